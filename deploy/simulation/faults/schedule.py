"""A fault schedule: a small cluster, its requests and everything that fails, all derived from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from deploy.simulation.simulated_drafter import DrafterSkill, DrafterSpeed
from deploy.simulation.weather import FaultWindow

VOCABULARY_SIZE = 211
EOS_TOKENS = (2,)
MAX_CONTEXT_LEN = 96
FAULT_SECONDS = 1.5
"""Faults begin within this time."""
LONGEST_FAULT_SECONDS = 3.0
PATIENCE_SECONDS = 240.0
"""Every request without a deadline of its own ends within this time after its arrival."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One client's request and what the client does."""

    at: float
    prompt: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    n: int
    stops: tuple[int, ...]
    salt: str
    timeout_seconds: float
    leaves_after: int | None
    """The client leaves after this many tokens; `None`: it stays."""
    max_draft_tokens: int | None
    stop_string: str | None
    aborts_after: int | None
    """The client aborts its request after this many tokens; `None`: it does not."""
    resumes_by_count: bool
    """Whether the client, when its ingress is lost, sends how many tokens it has instead of the tokens."""


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """A fault of one process."""

    at: float
    kind: str
    """`kill`, `vanish` (a kill that no caller is told of), `drain`, `freeze`, `shortage` (KV blocks of a target are
    taken away), `stale` (a drafter repeats its answers)."""
    role: str
    """`target`, `draft`, `coordinator` or `ingress`."""
    index: int
    seconds: float
    """Until the process is started again or continues."""


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """One simulated run."""

    seed: int
    targets: int
    drafters: int
    ingresses: int
    settings: dict[str, object]
    block_size: int
    blocks: int
    prefix_cache: bool
    step_seconds: float
    latency_seconds: float
    skill: DrafterSkill
    speed: DrafterSpeed
    requests: tuple[PlannedRequest, ...]
    events: tuple[FaultEvent, ...]
    windows: tuple[FaultWindow, ...]


def derive(seed: int) -> FaultSchedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    targets = rng.choice([1, 1, 2, 2, 3])
    is_colocated = rng.random() < 0.2
    drafters = 0 if is_colocated else rng.choice([0, 1, 1, 2, 3])
    block_size = rng.choice([3, 4, 8])
    blocks = rng.choice([100, 140, 400]) // block_size
    ingresses = rng.choice([1, 2])
    depth = rng.choice([1, 3, 6])
    step_seconds = rng.choice([0.002, 0.01, 0.03])
    settings: dict[str, object] = {
        "target.step_timeout_seconds": rng.choice([0.5, 2.0]),
        "draft.method": "ngram" if drafters or is_colocated else "none",
        "draft.placement": "target" if is_colocated else "drafter",
        "draft.max_nodes": rng.choice([depth, depth + 4]),
        "draft.max_depth": depth,
        "draft.controller": rng.choice(["off", "off", "auto"]),
        "draft.alternate": "off" if is_colocated else rng.choice(["off", "off", "on"]),
        "draft.timeout_seconds": rng.choice([0.02, 0.2]),
        "scheduler.max_sequences": rng.choice([3, 8, 16]),
        "scheduler.max_step_tokens": rng.choice([16, 32, 64]),
        "scheduler.max_prompt_tokens": rng.choice([None, 5]),
        "scheduler.max_waiting": rng.choice([3, 64]),
    }
    pool = min(MAX_CONTEXT_LEN, blocks * block_size)
    common = tuple(rng.randrange(3, VOCABULARY_SIZE) for _ in range(24))
    count = rng.randrange(2, 7)
    return FaultSchedule(
        seed=seed,
        targets=targets,
        drafters=drafters,
        ingresses=ingresses,
        settings=settings,
        block_size=block_size,
        blocks=blocks,
        prefix_cache=rng.random() < 0.7,
        step_seconds=step_seconds,
        latency_seconds=rng.choice([0.0001, 0.001]),
        skill=DrafterSkill(rng.choice([0.0, 0.5, 0.8, 1.0]), rng.choice([1, 1, 3]), rng.random() < 0.5),
        speed=DrafterSpeed(0.0005, 0.0, rng.choice([0.0, 0.002]), rng.choice([0.0, 0.001])),
        requests=tuple(_request(rng, index, common, pool) for index in range(count)),
        events=tuple(_event(rng, targets, drafters, ingresses) for _ in range(rng.choice([0, 1, 2, 4]))),
        windows=tuple(_window(rng) for _ in range(rng.choice([0, 1, 2, 3]))),
    )


def _request(rng: random.Random, index: int, common: tuple[int, ...], pool: int) -> PlannedRequest:
    own = tuple(rng.randrange(3, VOCABULARY_SIZE) for _ in range(rng.randrange(1, 5)))
    prompt = common[: rng.randrange(0, 24)] + own
    return PlannedRequest(
        at=rng.uniform(0.0, 0.6),
        prompt=prompt,
        seed=index + 1,
        temperature=rng.choice([0.0, 1.0]),
        max_tokens=min(rng.randrange(1, 32), pool - len(prompt)),
        n=rng.choice([1, 1, 1, 2, 3]),
        stops=tuple(rng.sample(range(VOCABULARY_SIZE), rng.choice([0, 0, 3]))),
        salt=rng.choice(["", "", "tenant"]),
        timeout_seconds=rng.uniform(0.02, 1.5) if rng.random() < 0.12 else PATIENCE_SECONDS,
        leaves_after=rng.randrange(0, 12) if rng.random() < 0.15 else None,
        max_draft_tokens=rng.choice([None, None, None, 0, 2]),
        stop_string=f"{rng.randrange(10)} {rng.randrange(1, 10)}" if rng.random() < 0.2 else None,
        aborts_after=rng.randrange(1, 12) if rng.random() < 0.08 else None,
        resumes_by_count=rng.random() < 0.3,
    )


def _event(rng: random.Random, targets: int, drafters: int, ingresses: int) -> FaultEvent:
    counts = {"target": targets, "draft": drafters, "coordinator": targets, "ingress": ingresses}
    role = rng.choice([name for name, count in counts.items() if count])
    kinds = {
        "target": ["kill", "vanish", "freeze", "shortage"],
        "draft": ["kill", "vanish", "freeze", "stale"],
        "coordinator": ["kill", "vanish", "freeze", "drain"],
        "ingress": ["kill", "freeze"],
    }
    kind = rng.choice(kinds[role])
    seconds = rng.choice([0.01, 0.1, 0.5, LONGEST_FAULT_SECONDS])
    return FaultEvent(rng.uniform(0.0, FAULT_SECONDS), kind, role, rng.randrange(counts[role]), seconds)


def _window(rng: random.Random) -> FaultWindow:
    begin = rng.uniform(0.0, FAULT_SECONDS)
    end = begin + rng.choice([0.05, 0.3, 1.0])
    kind = rng.choice(["loss", "loss", "delay", "duplicate", "reorder"])
    prefix = rng.choice(["", "target", "draft", "coordinator"])
    return FaultWindow(kind, begin, end, rng.choice([0.05, 0.3, 1.0]), rng.choice([0.005, 0.1, 1.0]), prefix)
