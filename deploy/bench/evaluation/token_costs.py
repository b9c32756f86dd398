"""What a token of an answer costs: passes, arithmetic, bytes that are read, processor time, energy and memory.

Arithmetic is that of the matrices. Bytes are computed from the passes and the lengths of the sequences, not measured:
every pass of the target reads its weights once, and every step of a sequence reads the keys and values before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.bench.contestants.answers import BenchAnswer, BenchPass
from deploy.bench.measuring import measures
from deploy.bench.measuring.results import Cost, sum_of


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Costs over all tokens of the passes. A figure is `None` where something that it needs is unknown."""

    steps: float | None = None
    """Steps of the target per token."""
    target_flops: float | None = None
    """Floating-point operations of the target per token, without prompts."""
    draft_flops: float | None = None
    """Floating-point operations of drafting per token, estimated: see `measures.draft_flops`."""
    weight_bytes: float | None = None
    """Bytes of weights that are read per token, prompts included."""
    kv_bytes: float | None = None
    """Bytes of the target's keys and values that are read per token, without prompts."""
    cpu_seconds: float | None = None
    """CPU seconds of all measured processes per 1,000 tokens."""
    busy_seconds: float | None = None
    """Seconds that target and drafters computed, per 1,000 tokens: GPU seconds where they are on GPUs."""
    joules: float | None = None
    """Energy per 1,000 tokens."""
    peak_bytes: int | None = None
    """Largest resident memory of a process."""
    intensity: float | None = None
    """Floating-point operations per byte that is read, prompts included."""
    flops_per_second: float | None = None
    """Floating-point operations per second of the passes, prompts included."""


def token_costs(cost: Cost, passes: Sequence[BenchPass]) -> TokenCosts:
    """The costs of the tokens of some passes."""
    tokens = sum(found.tokens for found in passes)
    if not tokens:
        return TokenCosts()
    target_flops = cost.target_flops * cost.sequences
    per_token = measures.per_committed_token(passes)
    weights, kv = _weight_bytes(cost, passes), kv_bytes_read(cost, passes)
    flops = _flops(cost, passes)
    read = None if weights is None or kv is None else weights + kv
    seconds = sum(found.seconds for found in passes)
    cpu = [found.resources.cpu_seconds for found in passes]
    joules = [found.resources.joules for found in passes]
    busy = _counted(passes, "target_seconds") + _counted(passes, "drafter_seconds")
    peaks = [most for found in passes for most in found.resources.peak_bytes.values()]
    return TokenCosts(
        steps=None if per_token is None else per_token[0],
        target_flops=None if per_token is None or not target_flops else target_flops * per_token[1],
        draft_flops=measures.draft_flops(cost, passes) / tokens if cost.target_flops else None,
        weight_bytes=None if weights is None else weights / tokens,
        kv_bytes=None if kv is None else kv / tokens,
        cpu_seconds=_per_thousand(cpu, tokens),
        busy_seconds=1000.0 * busy / tokens if busy else None,
        joules=_per_thousand(joules, tokens),
        peak_bytes=max(peaks, default=None),
        intensity=flops / read if flops and read else None,
        flops_per_second=flops / seconds if flops and seconds else None,
    )


def kv_bytes_read(cost: Cost, passes: Sequence[BenchPass]) -> float | None:
    """Bytes of the target's keys and values that the steps after the prompts read; `None` where lengths are unknown."""
    answers = [answer for found in passes for answer in found.answers if answer.arrivals]
    if not cost.kv_layers or not answers or not all(answer.prompt_tokens and answer.steps for answer in answers):
        return None
    read = sum(
        layer.token_bytes * min(stored, layer.window or stored)
        for answer in answers
        for stored in (_stored_tokens(answer) if cost.sequences == 1 else _stored_by_beams(answer))
        for layer in cost.kv_layers
    )
    return float(cost.sequences * read)


def _stored_tokens(answer: BenchAnswer) -> Iterator[int]:
    """The number of tokens before each commit after the first, which the prompt's pass decides."""
    stored = answer.prompt_tokens
    for arrival in answer.arrivals[:-1]:
        stored += arrival.tokens
        yield stored


def _stored_by_beams(answer: BenchAnswer) -> range:
    """The number of tokens before each step of one beam. A beam grows by a token in every step."""
    return range(answer.prompt_tokens + 1, answer.prompt_tokens + answer.steps)


def _weight_bytes(cost: Cost, passes: Sequence[BenchPass]) -> float | None:
    """Bytes of weights that all passes read. A drafter reads its weights once per proposed token of a batch's row.

    That is an upper bound for trees, whose nodes of one depth share a pass.
    """
    target_passes = _counted(passes, "target_passes")
    if not target_passes or not cost.read_bytes:
        return None
    steps = sum(answer.steps for found in passes for answer in found.answers)
    rows = max(1.0, steps / target_passes)
    return cost.read_bytes * target_passes + cost.draft_bytes * _counted(passes, "proposed_tokens") / rows


def _flops(cost: Cost, passes: Sequence[BenchPass]) -> float | None:
    """Operations of the target, prompts included, and of drafting; `None` where they are unknown."""
    answers = [answer for found in passes for answer in found.answers]
    if not cost.target_flops or not all(answer.steps for answer in answers if answer.completion_tokens):
        return None
    computed = sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)
    computed += cost.sequences * sum(answer.steps + answer.drafted for answer in answers)
    return cost.target_flops * computed + measures.draft_flops(cost, passes)


def _counted(passes: Sequence[BenchPass], name: str) -> float:
    return sum(found.counters.get(name, 0.0) for found in passes)


def _per_thousand(values: Sequence[float | None], tokens: int) -> float | None:
    total = sum_of(values)
    return None if total is None else 1000.0 * total / tokens
