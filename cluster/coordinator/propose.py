"""Guesses for the rows of a round: whom to ask and when, whom not to wait for, and what goes to the target.

Three ways of asking share one call. Who is verified now is asked and waited for. With halves that take turns, who is
verified next is asked while the target computes. And where guessing does not pay, a few are asked in the shadow of a
step, now and then: nobody waits, nothing is verified, the guess is held against what the target decides anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.coordinator.clients.drafter import Ask
from cluster.coordinator.clients.drafter_pool import Calls, Drafting
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.running import Lane
from cluster.core.config import DraftSection
from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.scheduler import Plan, PlannedRow
from cluster.core.sequence import Sequence as Answer
from cluster.core.tree import TokenTree
from cluster.core.verification import TargetInfo, VerifyRow
from cluster.speculation.controller import Judge, Weighed

SHADOW_SHARE = 0.01
"""Most of the time that may go into asking those for whom guessing does not pay; as much goes into telling them."""
SHADOWED = 4
"""Sequences asked at a time in a step's shadow."""
LONGEST_PAUSE = 8.0
"""While it goes on not to pay, they are asked so many times as seldom at last."""
FIRST_PAUSE = 1 / 16
"""And so many times as seldom at first, when nothing is known."""

Asked = dict[SequenceId, tuple[Answer, DraftBudget]]


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a round takes to the target."""

    trees: Mapping[SequenceId, TokenTree]
    asked: int = 0
    """Sequences that were asked for, and waited for."""
    waited: float = 0.0
    """Seconds."""
    expected: Weighed | None = None
    """What the controller thinks will come of it, where there is one."""


@dataclass(slots=True)
class _Allowance:
    """Time for what brings nothing now: after so many seconds of it there is none for many times as long."""

    spent: Calls | None = None
    """What is under way."""
    due: float = float("-inf")

    def is_left(self, now: float) -> bool:
        """Whether more may be spent."""
        return self.spent is None and now >= self.due

    def settle(self, now: float, pause: float) -> float | None:
        """The seconds that it took, if it is over since the last call."""
        if self.spent is None or not self.spent.done:
            return None
        seconds, self.spent = self.spent.seconds, None
        self.due = now + pause * seconds / SHADOW_SHARE
        return seconds


@dataclass(frozen=True, slots=True)
class _Asking:
    calls: Calls
    asked: Asked

    @property
    def depth(self) -> int:
        return max((budget.max_depth for _, budget in self.asked.values()), default=0)


class Guessing:
    """Decides with its judge, asks through `drafting`."""

    def __init__(
        self,
        drafting: Drafting,
        section: DraftSection,
        most_rows: int,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._drafting = drafting
        self._most_rows = most_rows
        self._metrics = metrics
        self._clock = clock
        self.most = NO_DRAFT if section.method == "none" else DraftBudget(section.max_nodes, section.max_depth)
        """The largest tree."""
        self._judge = Judge(self.most) if section.controller == "auto" and self.most.max_nodes else None
        self._alternates = section.alternate == "on"
        self._vocabulary_size = 0
        self._ahead: _Asking | None = None
        self._shadow: _Asking | None = None
        self._asking, self._telling = _Allowance(), _Allowance()
        self._pause = FIRST_PAUSE
        self._turn = 0
        self._rows = 1
        self._deciding: frozenset[SequenceId] = frozenset()

    def begin(self, info: TargetInfo) -> None:
        """The target was met, for the first time or again."""
        self._vocabulary_size = info.vocabulary_size
        if self._judge is not None:
            self._judge.begin(info.profile)

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """The sequences are over."""
        sequence_ids = tuple(sequence_ids)
        self._drafting.forget(sequence_ids)
        if self._judge is not None:
            self._judge.forget(sequence_ids)

    async def close(self, timeout_seconds: float) -> None:
        """End what is under way with the drafters."""
        await self._drafting.close(timeout_seconds)

    # --- before the plan ---

    def wish(self, lanes: Iterable[Lane]) -> None:
        """Say how large a tree each lane should be granted; those that wait or still fill, none."""
        if self._judge is None:
            return
        lanes = tuple(lane for lane in lanes if lane.sequence.finish is None)  # parents of beams stay for their heirs
        deciding = [lane for lane in lanes if lane.sequence.missing == 1]
        names = frozenset([lane.sequence.id for lane in deciding])
        if not names <= self._deciding:
            self._pause = min(1.0, self._pause)  # of the new ones nothing is known yet
        # Who waits or fills will decide soon: what pays for a few until then is not worth beginning with.
        self._rows = max(1, len(deciding), min(len(lanes), self._most_rows))
        if names != self._deciding or self._judge.is_due:
            able = [
                (lane.sequence, most)
                for lane in deciding
                if (most := lane.most(self.most)).max_nodes and (self._judge.is_resting or self._is_worth_telling(lane))
            ]
            self._judge.choose(able, rows=self._rows, halves=self._alternates)
        self._deciding = names
        sizes = self._judge.sizes(len(deciding))
        for lane in lanes:
            lane.draft = sizes.get(lane.sequence.id, NO_DRAFT) if sizes else NO_DRAFT

    def turn(self, plan: Plan) -> tuple[Plan, Plan]:
        """Who goes now, and who goes next and is to be asked for meanwhile. Prompts go whenever they can."""
        wanting = [row for row in plan.rows if row.decide and row.draft.max_nodes]
        if not self._alternates or len(wanting) < 2:
            return plan, Plan()
        ahead = {} if self._ahead is None else self._ahead.asked
        now = [row.sequence_id for row in wanting if row.sequence_id in ahead] or [
            row.sequence_id for row in wanting[: len(wanting) // 2]
        ]
        later = {row.sequence_id for row in wanting}.difference(now)
        first = tuple(row for row in plan.rows if row.sequence_id not in later)
        return replace(plan, rows=first), Plan(rows=tuple(row for row in plan.rows if row.sequence_id in later))

    # --- the round ---

    async def gather(self, plan: Plan, running: Mapping[SequenceId, Lane]) -> Guesses:
        """Trees for the rows that decide and have room for one. Raises nothing."""
        begun = self._clock()
        asking, self._ahead = self._ahead, None
        wanting = {row.sequence_id for row in plan.rows if row.decide and row.draft.max_nodes}
        if asking is None or wanting.isdisjoint(asking.asked):
            asking = self._ask(plan.rows, running)
        if asking is None:
            return Guesses({})
        patience = float("inf") if self._judge is None else self._judge.patience(len(asking.asked), asking.depth)
        await asking.calls.wait(patience)
        proposals = {
            name: proposal
            for name, proposal in asking.calls.take().items()
            if name in running and proposal.base_len == len(running[name].sequence)
        }
        waited = self._clock() - begun
        for proposal in proposals.values():
            self._metrics.proposed(len(proposal.tree), proposal.ready)
        if self._judge is None:
            trees = {name: proposal.tree for name, proposal in proposals.items()}
            return Guesses(trees, len(asking.asked), waited)
        if proposals or not asking.calls.done:  # who refuses at once tells nothing of how long proposals take
            self._judge.waited(len(proposals) or len(asking.asked), asking.depth, waited)
        deciding, tokens = sum(row.decide for row in plan.rows), sum(row.pending for row in plan.rows)
        weighed = self._judge.weigh(asking.asked, proposals, rows=deciding, tokens=tokens, waited=waited)
        for name in proposals:
            self._metrics.chose(len(weighed.trees.get(name, ())))
        return Guesses(weighed.trees, len(asking.asked), waited, weighed)

    def meanwhile(self, later: Plan, running: Mapping[SequenceId, Lane]) -> None:
        """Use the time in which the target computes: ask for who goes next, learn, look what others would have got.

        Called with the step; it begins two turns of the event loop later, when the step is on its way.
        """
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._use_time, later, running)

    def stepped(self, rows: Sequence[VerifyRow], guesses: Guesses, seconds: float, committed: int) -> None:
        """A round took so long from plan to plan. Prompts teach nothing: they are not what is to be compared."""
        if self._judge is None or any(len(row.pending) > 1 for row in rows):
            return
        width, rest = sum(row.width for row in rows), max(0.0, seconds - guesses.waited)
        self._judge.stepped(len(rows), width, rest, waited=guesses.waited, committed=committed)
        if guesses.expected is not None:
            self._metrics.foreseen(guesses.expected.step_seconds + guesses.waited, seconds)

    def _ask(self, rows: Iterable[PlannedRow], running: Mapping[SequenceId, Lane]) -> _Asking | None:
        asked = {
            row.sequence_id: (lane.sequence, row.draft)
            for row in rows
            if row.decide and row.draft.max_nodes and (lane := running.get(row.sequence_id))
        }
        return self._start(asked) if asked else None

    def _start(self, asked: Asked) -> _Asking:
        asks = [Ask(answer, budget) for answer, budget in asked.values()]
        return _Asking(self._drafting.start(asks, self._vocabulary_size), asked)

    # --- while the target computes ---

    def _use_time(self, later: Plan, running: Mapping[SequenceId, Lane]) -> None:
        self._ahead = self._ask(later.rows, running)
        able = [lane for lane in running.values() if lane.most(self.most).max_nodes]
        if self._judge is None or not self._judge.is_resting:
            worth = (lane.sequence for lane in able if self._is_worth_telling(lane))
            self._drafting.tell(worth, self._vocabulary_size)
        if self._judge is not None:
            self._judge.settle()
            self._end_shadow()
            self._begin_shadow([lane for lane in able if lane.sequence.missing == 1 and lane.draft == NO_DRAFT])

    def _is_worth_telling(self, lane: Lane) -> bool:
        """Whether a drafter that must learn a sequence first will save more time than that takes."""
        if self._judge is None:
            return True
        seconds = self._drafting.telling_seconds(lane.sequence)
        return self._judge.is_worth(seconds, self._rows, lane.sequence.remaining)

    def _begin_shadow(self, lanes: Sequence[Lane]) -> None:
        """Ask for some of those that go without, in turn, and let a drafter learn one more of them.

        A long prompt costs a drafter many times what a guess does: those that it knows are asked again and again.
        """
        if not lanes or not self._drafting.is_idle:
            return
        first = self._turn % len(lanes)
        self._turn += SHADOWED
        lanes = [*lanes[first:], *lanes[:first]]
        known = [lane for lane in lanes if self._drafting.knows(lane.sequence)]
        if known and self._asking.is_left(self._clock()):
            asking = self._start({lane.id: (lane.sequence, lane.most(self.most)) for lane in known[:SHADOWED]})
            if asking.calls:
                self._shadow, self._asking.spent = asking, asking.calls
        elif len(known) < len(lanes) and self._telling.is_left(self._clock()):
            new = next(lane for lane in lanes if lane not in known)
            told = self._drafting.tell((new.sequence,), self._vocabulary_size)
            if told:
                self._telling.spent = told

    def _end_shadow(self) -> None:
        """Note what came, and rest the longer, the longer the answer took."""
        self._telling.settle(self._clock(), max(1.0, self._pause))  # the first of them tells most
        seconds = self._asking.settle(self._clock(), self._pause)
        if seconds is None or self._shadow is None or self._judge is None:
            return
        asking, self._shadow = self._shadow, None
        proposals = asking.calls.take()
        for name, proposal in proposals.items():
            self._judge.note(*asking.asked[name], proposal)
        if proposals:
            self._judge.answered(len(asking.asked), asking.depth, seconds)
        self._pause = min(LONGEST_PAUSE, self._pause * 2) if self._judge.is_resting else 1.0
