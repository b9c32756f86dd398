"""Serving in simulated time: steps and proposals take what a law says, the clock jumps, and a minute takes a moment."""

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
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, StepResult, StepSample, TargetInfo
from tests.support.fake_cluster import all_tokens, configure, request
from tests.support.fake_drafters import FakeDrafter, FakeTarget

Value = TypeVar("Value")

TOO_LONG_SECONDS = 60.0
"""Simulated: what waits for longer waits for ever."""


class _Selector(selectors.SelectSelector):
    """Never waits: the time that it should have waited has passed at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors`."""
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.now += max(0.0, timeout)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in which only sleeping takes time."""

    def __init__(self) -> None:
        self._simulated = _Selector()
        super().__init__(self._simulated)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._simulated.now


def simulate(work: Coroutine[Any, Any, Value]) -> Value:
    """Run `work` to its end in simulated time."""

    async def bounded() -> Value:
        async with asyncio.timeout(TOO_LONG_SECONDS):
            return await work

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(bounded())


def now() -> float:
    """The simulated time, in seconds."""
    return asyncio.get_running_loop().time()


Law = Callable[[int, int], float]


def cpu_step(rows: int, tokens: int) -> float:
    """Two cores: flat to eight tokens, then in proportion, and something for each row."""
    return 0.007 + 0.0001 * rows + 0.00015 * min(tokens, 8) + 0.0006 * max(0, tokens - 8)


def gpu_step(rows: int, tokens: int) -> float:
    """A memory-bound device: hardly more for 64 tokens than for one, in stairs."""
    return 0.010 + 0.00002 * rows + 0.0004 * -(-tokens // 32)


class TimedTarget(FakeTarget):
    """Steps take what its law says; it has measured a few of them before."""

    def __init__(self, law: Law, *, profiled: bool = True) -> None:
        super().__init__(blocks=100_000, max_context_len=4096, vocabulary_size=97)
        self.law = law
        self.profiled = profiled

    async def step(self, batch: StepBatch) -> StepResult:
        """See `Target`."""
        await asyncio.sleep(self.law(len(batch.rows), sum(row.width for row in batch.rows)))
        return await super().step(batch)

    async def info(self) -> TargetInfo:
        """See `Target`."""
        info = await super().info()
        sizes = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (8, 8), (8, 32), (32, 32))
        profile = tuple(StepSample(rows, tokens, self.law(rows, tokens)) for rows, tokens in sizes)
        return replace(info, profile=profile if self.profiled else ())

    def next_token(self, tokens: Sequence[int], sampling: SamplingParameters) -> int:
        """A cheaper hash than its parent's: of the length and the seed, and so not of what came before."""
        return zlib.crc32(b"%d %d" % (len(tokens), sampling.seed)) % self.vocabulary_size


@dataclass(frozen=True, slots=True)
class Habit:
    """What a drafter is like."""

    acceptance: float
    """The chance that a guess is right where those above it are."""
    silence: float = 0.0
    """The chance that it has nothing to say."""
    call_seconds: float = 0.0006
    row_seconds: float = 0.00005
    depth_seconds: float = 0.0
    """What each token of the deepest chain takes."""
    tells: bool = False
    """Whether it says how likely its guesses are."""


class TimedDrafter(FakeDrafter):
    """Guesses chains, by its habit, which may change."""

    def __init__(self, target: FakeTarget, habit: Habit) -> None:
        super().__init__(target)
        self.habit = habit

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        """See `Drafter`."""
        habit, deepest = self.habit, max((row.budget.max_depth for row in rows), default=0)
        await asyncio.sleep(habit.call_seconds + habit.row_seconds * len(rows) + habit.depth_seconds * deepest)
        return await super().propose(rows, timeout_seconds)

    def answer(self, row: DraftRow) -> Proposal:
        """See `FakeDrafter`."""
        proposal = super().answer(row)
        if not self.habit.tells:
            return proposal
        chances = tuple(self.habit.acceptance**depth for depth in proposal.tree.depths())
        return Proposal(row.sequence_id, row.base_len, proposal.tree, proposal.fault, chances)

    def guess(self, sampling: SamplingParameters, tokens: list[int], row: DraftRow) -> TokenTree:
        """A chain whose tokens are right by chance."""
        if self._draw(sampling.seed, len(tokens), 0) < self.habit.silence:
            return TokenTree()
        chain = list(tokens)
        for depth in range(1, min(row.budget.max_nodes, row.budget.max_depth) + 1):
            right = self.target.next_token(chain, sampling)
            is_right = self._draw(sampling.seed, len(chain), depth) < self.habit.acceptance
            chain.append(right if is_right else (right + 1) % self.target.vocabulary_size)
        return TokenTree.chain(chain[len(tokens) :])

    @staticmethod
    def _draw(seed: int, place: int, depth: int) -> float:
        digest = hashlib.blake2b(b"%d/%d/%d" % (seed, place, depth), digest_size=4).digest()
        return int.from_bytes(digest, "little") / 2**32


async def measure(
    law: Law,
    habit: Habit | None,
    batch: int,
    tokens: int = 200,
    *,
    before: int = 0,
    profiled: bool = True,
    **settings: object,
) -> float:
    """Tokens per second of `batch` answers side by side; without a habit, of plain decoding.

    `before`: tokens of as many answers that were given earlier.
    """
    target = TimedTarget(law, profiled=profiled)
    drafter = TimedDrafter(target, habit or Habit(0.0))
    overrides: dict[str, object] = {
        "draft__controller": "auto",
        "draft__max_nodes": 8,
        "draft__max_depth": 8,
        "scheduler__max_step_tokens": 512,
    }
    if habit is None:
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
        raise AssertionError("another text")
    return batch * tokens / seconds
