"""The next step of a target, launched before its rows come.

Between the verdicts of a step and the launch of the next one a GPU has nothing to do: verdicts go to the coordinator,
rows come back, and the host plans them. Most steps follow from the one before: each sequence goes on with the last
token of its verdict, and with the draft that came with it. So the step that is expected is launched while no call
waits. If its rows come, only their decisions are left to read. What is drafted after the step is asked for anew, as
long as its pass has recorded enough. If others come, it is dropped as a step that has failed: nothing of it was
committed. No token depends on it, but a pass is lost. Therefore steps are launched only while nearly all of them come
as they are expected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from cluster.core.ids import SequenceId
from cluster.core.tree import EMPTY_TREE
from cluster.core.verification import StepBatch, Verdict, VerifyRow
from workers.transfer import DeviceTimer
from workers.verify.prompt_logprobs import ScoredPrompt
from workers.verify.sequence_state import ReadyRow, SequenceState
from workers.verify.walk import TreeWalk

LEAST_SHARE = 0.95
"""Share of the steps that must come as they are expected. A pass of a model of 8B takes 10 to 20 times as long as a GPU
waits between two steps: what 19 steps gain is about what one lost pass costs."""
_WEIGHT = 1 / 64
"""Weight of the latest step in that share."""
_FEW_ROWS = 8
"""Rows whose next ones are found in a few microseconds. While too few steps come as they are expected, fewer of those
with more rows are looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedRows:
    """Rows of a step whose pass and decisions a device may still compute."""

    ready: Sequence[ReadyRow]
    logits: torch.Tensor
    """`[decisions, vocabulary (this rank's part)]`"""
    prompts: Sequence[ScoredPrompt]
    walk: TreeWalk
    timer: DeviceTimer
    """Times the pass and the decisions."""


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step of which everything is launched, and nothing is committed."""

    begun: float
    """When the launch began, in seconds on the clock of `time.perf_counter`."""
    verdicts: dict[SequenceId, Verdict]
    """Verdicts on rows that need no pass."""
    rows: LaunchedRows | None
    """The other rows, if any are launched."""

    def asked(self, batch: StepBatch) -> LaunchedStep:
        """The step with what these rows, which its pass computes one for one, ask for after it."""
        if self.rows is None:
            return self
        ready = [
            replace(entry, row=_asked(entry.row, row), sent=row)
            for entry, row in zip(self.rows.ready, batch.rows, strict=True)
        ]
        return replace(self, rows=replace(self.rows, ready=ready))


class StepsAhead:
    """Expects the rows of each next step, and holds that step if it is launched before they come."""

    def __init__(
        self,
        forget: Callable[[Sequence[ReadyRow]], None],
        records: Callable[[Sequence[VerifyRow], Sequence[VerifyRow]], bool],
        *,
        is_on: bool,
    ) -> None:
        """`forget` frees what was reserved for rows of which nothing is committed. `records` says whether a pass of
        the first rows records what the drafts after the second ones need. Unless it `is_on`, no rows are expected.
        """
        self.is_on = is_on
        self._forget = forget
        self._records = records
        self._ended: tuple[StepBatch, Sequence[Verdict]] | None = None
        """The last step, as long as the next one may follow from it."""
        self._expected: StepBatch | None = None
        self._launched: LaunchedStep | None = None
        self._taken: LaunchedStep | None = None
        """The step under way, if it was launched before its rows came."""
        self._lost: DeviceTimer | None = None
        """Times the step that was dropped for the one under way."""
        self._share = 0.0
        """Share of the steps that came as expected, the latest with the largest weight."""
        self._passed_over = 0
        """Steps since the last one that was looked at."""

    def end(self, batch: StepBatch, verdicts: Sequence[Verdict]) -> None:
        """Record that a step has ended with these verdicts, one per row."""
        self._taken = self._lost = None
        self._passed_over += 1
        if self.is_on and (self._share >= LEAST_SHARE or self._passed_over > len(batch.rows) // _FEW_ROWS):
            self._ended = batch, verdicts
            self._passed_over = 0

    def expect(self, sequences: Mapping[SequenceId, SequenceState]) -> StepBatch | None:
        """The rows that are expected next, given the stored sequences; `None` if there is none to launch."""
        if self._launched is not None:
            return None
        self._expected = None if self._ended is None else _following(*self._ended, sequences)
        return self._expected if self._share >= LEAST_SHARE else None

    def hold(self, step: LaunchedStep) -> None:
        """Hold the step with the rows that `expect` has returned, if they are launched."""
        self._launched = None if step.rows is None else step

    def take(self, batch: StepBatch) -> LaunchedStep | None:
        """The step with these rows, if it is launched already. Another one is dropped."""
        launched, expected = self._launched, self._expected
        is_equal = expected == batch
        is_expected = expected is not None and (is_equal or self._is_asked_anew(expected.rows, batch.rows))
        if expected is not None:
            self._count(is_expected)
        self._clear()
        if launched is not None and not is_expected:
            self._lose(launched)
            launched = None
        self._taken = launched if launched is None or is_equal else launched.asked(batch)
        return self._taken

    def seconds_before(self, came: float) -> float:
        """How long the target worked on the step under way before its rows came at `came`, in seconds.

        Negative for as long as a GPU then still computed a step that was dropped. Call it when the decisions of the
        step have been read.
        """
        taken = self._taken
        timer = self._lost if taken is None or taken.rows is None else taken.rows.timer
        done_at = None if timer is None else timer.done_at
        if done_at is None:
            return 0.0
        return min(0.0, came - done_at) if taken is None else min(came, done_at) - taken.begun

    def drop(self) -> None:
        """Drop the step that is launched, and expect none until the next one has ended: its rows or its blocks change
        now. It counts as one that has not come, launched or not: a launched one would have been lost.
        """
        launched, expected = self._launched, self._expected
        self._clear()
        if expected is not None:
            self._count(is_expected=False)
        if launched is not None:
            self._lose(launched)

    def release(self, sequence_ids: Collection[SequenceId]) -> None:
        """Drop the step that is expected if it has a row of one of these sequences, which are released now."""
        if self._expected is not None and any(row.sequence_id in sequence_ids for row in self._expected.rows):
            self.drop()

    def _lose(self, step: LaunchedStep) -> None:
        if step.rows is not None:
            self._lost = step.rows.timer
            self._forget(step.rows.ready)

    def _is_asked_anew(self, expected: Sequence[VerifyRow], rows: Sequence[VerifyRow]) -> bool:
        """Whether the pass of the expected rows computes these, which ask for something else after it."""
        if len(expected) != len(rows) or any(_asked(*pair) != pair[1] for pair in zip(expected, rows, strict=True)):
            return False
        return self._records(expected, rows)

    def _count(self, is_expected: bool) -> None:
        self._share += _WEIGHT * (is_expected - self._share)

    def _clear(self) -> None:
        self._ended = self._expected = self._launched = None


def _asked(row: VerifyRow, other: VerifyRow) -> VerifyRow:
    """The row with what another one asks for after the pass."""
    return replace(row, next_budget=other.next_budget, wants_following=other.wants_following)


def _following(
    batch: StepBatch, verdicts: Sequence[Verdict], sequences: Mapping[SequenceId, SequenceState]
) -> StepBatch | None:
    """The rows that follow a step; `None` if its verdicts do not say them.

    A coordinator sends no more rows of a sequence that has ended, and adds what a grammar forces to the drafts.
    """
    rows: list[VerifyRow] = []
    for row, verdict in zip(batch.rows, verdicts, strict=True):
        sequence = sequences.get(row.sequence_id)
        if sequence is None:
            continue
        if verdict.fault is not None or not verdict.tokens or verdict.forced:
            return None
        if verdict.tokens[-1] in sequence.start.sampling.end_token_ids:
            continue
        draft = verdict.proposal
        rows.append(
            VerifyRow(
                row.sequence_id,
                row.base_len + len(verdict.tokens),
                verdict.tokens[-1:],
                EMPTY_TREE if draft is None else draft.tree,
                distributions=() if draft is None else draft.distributions,
                next_budget=row.next_budget,
                wants_following=row.wants_following,
            )
        )
    return StepBatch(tuple(rows)) if rows else None
