"""A coordinator over a fake target and fake drafters, and helpers for its tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.config.load import load
from cluster.core.config.sections import Configuration
from cluster.core.ids import RequestId
from cluster.core.request import BeamParameters, Commit, GenerationRequest, SamplingParameters, StoppingCriteria
from tests.support.fakes.fake_drafters import FakeDrafter
from tests.support.fakes.fake_target import FakeTarget

TOO_LONG_SECONDS = 30.0
"""Turns a hang into a failure. No test waits this long."""


def configure(**overrides: object) -> Configuration:
    """A configuration with small budgets, so that tests reach them; `draft__max_nodes=0` sets `draft.max_nodes`."""
    values: dict[str, object] = {"draft.max_nodes": 6, "draft.max_depth": 4, "scheduler.max_step_tokens": 32}
    values["draft.controller"] = "off"  # so that tree sizes do not depend on a clock
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
    """A request as the ingress makes it."""
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
    """Requests with different prompt lengths and seeds."""
    return [
        request(f"r{index}", range(1, 4 + 3 * index), max_tokens, temperature=temperature, seed=index)
        for index in range(count)
    ]


async def read(coordinator: Coordinator, wanted: GenerationRequest) -> list[Commit]:
    """All commits of a request."""
    return [commit async for commit in coordinator.generate(wanted)]


async def tokens_of(coordinator: Coordinator, wanted: GenerationRequest) -> list[int]:
    """The tokens of a request's answer."""
    return [token for commit in await read(coordinator, wanted) for token in commit.tokens]


async def answers_of(coordinator: Coordinator, wanted: GenerationRequest) -> list[list[int]]:
    """The tokens of each of the request's answers."""
    answers: list[list[int]] = [[] for _ in range(wanted.n)]
    for commit in await read(coordinator, wanted):
        answers[commit.index] += commit.tokens
    return answers


async def all_tokens(coordinator: Coordinator, wanted: Sequence[GenerationRequest]) -> list[list[int]]:
    """The tokens of requests that run at the same time."""
    return list(await asyncio.gather(*(tokens_of(coordinator, one) for one in wanted)))


async def first_commit_then_leave(coordinator: Coordinator, wanted: GenerationRequest) -> Commit:
    """Read one commit and disconnect."""
    async with aclosing(coordinator.generate(wanted)) as commits:
        return await anext(commits)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds. The timeout of the test ends a hang."""
    while not condition():  # noqa: ASYNC110 - the condition has no event
        await asyncio.sleep(0.001)


def value_of(coordinator_metrics: Metrics, name: str, **labels: str) -> float:
    """The value of one series; 0 when it does not exist."""
    return coordinator_metrics.registry.get_sample_value(name, {"model_name": "fake", "engine": "0", **labels}) or 0.0
