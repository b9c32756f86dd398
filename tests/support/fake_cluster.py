"""A coordinator over fakes, and the few moves that its tests make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.config import Configuration
from cluster.core.ids import RequestId
from cluster.core.load_config import load
from cluster.core.request import BeamParameters, Commit, GenerationRequest, SamplingParameters, StoppingCriteria
from tests.support.fake_drafters import FakeDrafter, FakeTarget

TOO_LONG_SECONDS = 30.0
"""No test waits for this; it only turns a hang into a failure."""


def configure(**overrides: object) -> Configuration:
    """Small budgets, so that every bound is met; `draft__max_nodes=0` sets `draft.max_nodes`."""
    values: dict[str, object] = {"draft.max_nodes": 6, "draft.max_depth": 4, "scheduler.max_step_tokens": 32}
    values["draft.controller"] = "off"  # what is asked for hangs on no clock
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    return load({}, values)


@asynccontextmanager
async def serving(target: FakeTarget, drafter: FakeDrafter, **overrides: object) -> AsyncIterator[Coordinator]:
    """A running coordinator."""
    async with asyncio.timeout(TOO_LONG_SECONDS):
        coordinator = Coordinator(target, [drafter], configure(**overrides), Metrics())
        async with coordinator:
            yield coordinator


def request(
    name: str = "r",
    prompt: Sequence[int] = (1, 2, 3, 4, 5),
    max_tokens: int = 12,
    *,
    temperature: float = 1.0,
    seed: int = 7,
    stop: frozenset[int] = frozenset(),
    deadline: float | None = None,
    salt: str = "",
    n: int = 1,
    beam: BeamParameters | None = None,
) -> GenerationRequest:
    """A request as the ingress would make it."""
    return GenerationRequest(
        RequestId(name),
        tuple(prompt),
        SamplingParameters(temperature=temperature, seed=seed),
        StoppingCriteria(max_tokens=max_tokens, stop_token_ids=stop),
        deadline,
        salt,
        n,
        beam,
    )


def requests(count: int, max_tokens: int = 20, temperature: float = 1.0) -> list[GenerationRequest]:
    """Distinct ones: prompts of several lengths, seeds of their own."""
    return [
        request(f"r{index}", range(1, 4 + 3 * index), max_tokens, temperature=temperature, seed=index)
        for index in range(count)
    ]


async def read(coordinator: Coordinator, wanted: GenerationRequest) -> list[Commit]:
    """The whole stream."""
    return [commit async for commit in coordinator.generate(wanted)]


async def tokens_of(coordinator: Coordinator, wanted: GenerationRequest) -> list[int]:
    """The answer's tokens."""
    return [token for commit in await read(coordinator, wanted) for token in commit.tokens]


async def answers_of(coordinator: Coordinator, wanted: GenerationRequest) -> list[list[int]]:
    """The tokens of each of the request's answers."""
    answers: list[list[int]] = [[] for _ in range(wanted.n)]
    for commit in await read(coordinator, wanted):
        answers[commit.index] += commit.tokens
    return answers


async def all_tokens(coordinator: Coordinator, wanted: Sequence[GenerationRequest]) -> list[list[int]]:
    """The answers to requests that run side by side."""
    return list(await asyncio.gather(*(tokens_of(coordinator, one) for one in wanted)))


async def first_commit_then_leave(coordinator: Coordinator, wanted: GenerationRequest) -> Commit:
    """A client that hangs up after the first words."""
    async with aclosing(coordinator.generate(wanted)) as commits:
        return await anext(commits)


async def until(condition: Callable[[], bool]) -> None:
    """Let the others work until it holds (a hang ends by the test's own timeout)."""
    while not condition():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.001)


def value_of(coordinator_metrics: Metrics, name: str, **labels: str) -> float:
    """One series' value; 0 when it was never touched."""
    return coordinator_metrics.registry.get_sample_value(name, {"model_name": "fake", **labels}) or 0.0
