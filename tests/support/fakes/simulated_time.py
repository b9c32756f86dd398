"""Serving in simulated time. Steps and proposals take modelled times, and sleeping takes no real time."""

from __future__ import annotations

import asyncio
import hashlib
import selectors
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.request import GenerationRequest, SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, StepResult, StepSample, TargetInfo
from tests.support.fakes.fake_cluster import all_tokens, configure, request
from tests.support.fakes.fake_drafters import FakeDrafter
from tests.support.fakes.fake_target import FakeTarget

Value = TypeVar("Value")

TOO_LONG_SECONDS = 60.0
"""Simulated seconds after which a wait counts as a hang."""


class _Selector(selectors.SelectSelector):
    """Returns at once and advances the simulated time instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all tasks wait and no timer is set")
        self.now += max(0.0, timeout)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in which only sleeping takes (simulated) time."""

    def __init__(self) -> None:
        self._simulated = _Selector()
        super().__init__(self._simulated)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._simulated.now


def simulate(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine in simulated time."""

    async def bounded() -> Value:
        async with asyncio.timeout(TOO_LONG_SECONDS):
            return await coroutine

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(bounded())


def now() -> float:
    """The simulated time, in seconds."""
    return asyncio.get_running_loop().time()


StepTime = Callable[[int, int], float]
"""The time of a step in seconds, from its rows and tokens."""


def cpu_step(rows: int, tokens: int) -> float:
    """The latency model of two CPU cores: flat up to eight tokens, then linear, with a small cost per row."""
    return 0.007 + 0.0001 * rows + 0.00015 * min(tokens, 8) + 0.0006 * max(0, tokens - 8)


def gpu_step(rows: int, tokens: int) -> float:
    """The latency model of a memory-bound GPU: a step function that is nearly flat up to 64 tokens."""
    return 0.010 + 0.00002 * rows + 0.0004 * -(-tokens // 32)


class TimedTarget(FakeTarget):
    """A target whose steps take `step_time`; with `profiled`, it has measured some of them during warm-up."""

    def __init__(self, step_time: StepTime, *, profiled: bool = True) -> None:
        super().__init__(blocks=100_000, max_context_len=4096, vocabulary_size=97)
        self.step_time = step_time
        self.profiled = profiled

    async def step(self, batch: StepBatch) -> StepResult:
        await asyncio.sleep(self.step_time(len(batch.rows), sum(row.width for row in batch.rows)))
        return await super().step(batch)

    async def info(self) -> TargetInfo:
        info = await super().info()
        sizes = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (8, 8), (8, 32), (32, 32))
        profile = tuple(StepSample(rows, tokens, self.step_time(rows, tokens)) for rows, tokens in sizes)
        return replace(info, profile=profile if self.profiled else ())

    def next_token(self, tokens: Sequence[int], sampling: SamplingParameters) -> int:
        """The decision after `tokens`: a cheap hash of the length and the seed only."""
        return zlib.crc32(b"%d %d" % (len(tokens), sampling.seed)) % self.vocabulary_size


@dataclass(frozen=True, slots=True)
class DrafterModel:
    """How accurate and how fast a drafter is. Times are in seconds."""

    acceptance: float
    """The probability that a drafted token is accepted if its parent is."""
    empty: float = 0.0
    """The probability of an empty tree."""
    call_seconds: float = 0.0006
    row_seconds: float = 0.00005
    depth_seconds: float = 0.0
    """Time per token of the deepest chain."""
    has_probabilities: bool = False
    """Whether the drafter sends probabilities."""


class TimedDrafter(FakeDrafter):
    """Drafts chains with the accuracy and speed of a `DrafterModel`, which may be replaced at any time."""

    def __init__(self, target: FakeTarget, model: DrafterModel) -> None:
        super().__init__(target)
        self.model = model

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        model, deepest = self.model, max((row.budget.max_depth for row in rows), default=0)
        await asyncio.sleep(model.call_seconds + model.row_seconds * len(rows) + model.depth_seconds * deepest)
        return await super().propose(rows, timeout_seconds)

    def answer(self, row: DraftRow) -> Proposal:
        proposal = super().answer(row)
        if not self.model.has_probabilities:
            return proposal
        chances = tuple(self.model.acceptance**depth for depth in proposal.tree.depths())
        return Proposal(row.sequence_id, row.base_len, proposal.tree, proposal.fault, chances)

    def draft(self, sampling: SamplingParameters, tokens: list[int], row: DraftRow) -> TokenTree:
        """A chain whose tokens are accepted at random."""
        if self._draw(sampling.seed, len(tokens), 0) < self.model.empty:
            return TokenTree()
        chain = list(tokens)
        for depth in range(1, min(row.budget.max_nodes, row.budget.max_depth) + 1):
            right = self.target.next_token(chain, sampling)
            is_right = self._draw(sampling.seed, len(chain), depth) < self.model.acceptance
            chain.append(right if is_right else (right + 1) % self.target.vocabulary_size)
        return TokenTree.chain(chain[len(tokens) :])

    @staticmethod
    def _draw(seed: int, position: int, depth: int) -> float:
        digest = hashlib.blake2b(b"%d/%d/%d" % (seed, position, depth), digest_size=4).digest()
        return int.from_bytes(digest, "little") / 2**32


class DraftingTarget(TimedTarget):
    """A timed target that drafts after each step for the rows whose `next_budget` asks for it."""

    def __init__(self, step_time: StepTime, model: DrafterModel) -> None:
        super().__init__(step_time)
        self.drafter = TimedDrafter(self, model)
        self.drafted = 0
        """Steps after which it has drafted."""

    async def step(self, batch: StepBatch) -> StepResult:
        result, model = await super().step(batch), self.drafter.model
        verdicts = list(result.verdicts)
        asked = [index for index, row in enumerate(batch.rows) if row.next_budget.max_nodes and verdicts[index].tokens]
        for index in asked:
            row, stored = batch.rows[index], self.stored[batch.rows[index].sequence_id]
            tokens = (*stored.tokens, verdicts[index].tokens[-1])
            draft = DraftRow(row.sequence_id, len(tokens), tokens, row.next_budget)
            proposal = Proposal(
                row.sequence_id, len(tokens), self.drafter.draft(stored.start.sampling, list(tokens), draft)
            )
            verdicts[index] = replace(verdicts[index], proposal=proposal)
        if not asked:
            return result
        deepest = max(batch.rows[index].next_budget.max_depth for index in asked)
        seconds = model.call_seconds + model.row_seconds * len(asked) + model.depth_seconds * deepest
        self.drafted += 1
        await asyncio.sleep(seconds)
        return replace(result, verdicts=tuple(verdicts), draft_seconds=seconds)


class PrefillingDrafter(TimedDrafter):
    """A timed drafter that also takes `token_seconds` for each new token of a sequence."""

    def __init__(self, target: FakeTarget, model: DrafterModel, token_seconds: float) -> None:
        super().__init__(target, model)
        self.token_seconds = token_seconds
        self.cancelled = 0
        """Number of calls that were cancelled."""

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        try:
            await asyncio.sleep(self.token_seconds * sum(len(row.new_tokens) for row in rows))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().propose(rows, timeout_seconds)


class SimulatedCluster:
    """A coordinator in simulated time with its target and drafters. It has a speculation controller by default."""

    def __init__(self, drafters: Sequence[FakeDrafter], target: FakeTarget, **settings: object) -> None:
        self.metrics = Metrics()
        self.target = target
        overrides = {"draft__controller": "auto", "scheduler__max_step_tokens": 512, "draft__max_nodes": 8}
        configuration = configure(**(overrides | settings))
        self.coordinator = Coordinator(target, drafters, configuration, self.metrics, now)

    async def serve(self, wanted: Sequence[GenerationRequest]) -> float:
        """Serve requests at the same time and check their tokens. Returns the time it took, in seconds."""
        begun = now()
        answers = await all_tokens(self.coordinator, wanted)
        assert answers == [self.target.answer(one) for one in wanted]
        return now() - begun


def equal_requests(count: int, tokens: int, name: str = "r") -> list[GenerationRequest]:
    """Requests with the same prompt and length, and different seeds."""
    return [request(f"{name}{index}", max_tokens=tokens, seed=index + 1) for index in range(count)]


async def tokens_per_second(
    step_time: StepTime,
    model: DrafterModel | None,
    batch: int,
    tokens: int = 200,
    *,
    before: int = 0,
    profiled: bool = True,
    **settings: object,
) -> float:
    """Measure the speed of `batch` answers at the same time; without a drafter model, of plain decoding.

    `before` is the length of as many answers that are served first.
    """
    target = TimedTarget(step_time, profiled=profiled)
    drafter = TimedDrafter(target, model or DrafterModel(0.0))
    overrides: dict[str, object] = {
        "draft__controller": "auto",
        "draft__max_nodes": 8,
        "draft__max_depth": 8,
        "scheduler__max_step_tokens": 512,
    }
    if model is None:
        overrides["draft__method"] = "none"
    configuration = configure(**(overrides | settings))
    wanted = [request(f"r{index}", max_tokens=tokens, seed=index + 1) for index in range(batch)]
    async with Coordinator(target, [drafter], configuration, Metrics(), now) as coordinator:
        if before:
            earlier = [request(f"e{index}", max_tokens=before, seed=index + 50) for index in range(batch)]
            await all_tokens(coordinator, earlier)
        begun = now()
        answers = await all_tokens(coordinator, wanted)
        seconds = now() - begun
    if answers != [target.answer(one) for one in wanted]:
        raise AssertionError("the tokens differ from those of plain decoding")
    return batch * tokens / seconds
