"""One sequence of a live request, and what the target may hold of it."""

from __future__ import annotations

from cluster.coordinator.requests.decoding_strategy import NewSequence
from cluster.core.drafting import DraftBudget
from cluster.core.ids import RequestId, SequenceId
from cluster.core.scheduling.allocation import clip_draft
from cluster.core.scheduling.state import SequenceView
from cluster.core.sequence import Sequence
from cluster.core.verification import VerifyRow

QUARANTINE_LOSSES = 4
"""Lost calls without progress in between after which a sequence is quarantined."""


class LiveSequence:
    """A sequence that waits, runs, or has finished while others may still share its KV.

    A request has one sequence, or several with the same first tokens (samples, beams). Only its own methods change it.
    """

    __slots__ = (
        "_deferred_until",
        "_has_been_open",
        "_has_drafts",
        "_has_source",
        "_is_open",
        "_losses",
        "_lost_row",
        "_may_fork",
        "_parent",
        "answer",
        "deferrals",
        "request_id",
        "sequence",
        "slot",
        "turn",
    )

    def __init__(
        self,
        sequence: Sequence,
        request_id: RequestId,
        new: NewSequence,
        parent: LiveSequence | None = None,
        turn: int = 0,
    ) -> None:
        """`new` is what the decoding strategy of the request asked for, `parent` the sequence whose KV it may share."""
        self.sequence = sequence
        self.request_id = request_id
        self.slot = new.slot
        """The sequence's slot in the decoding strategy of its request."""
        self.answer = new.answer
        """The index of the answer that the sequence writes; `None` for a beam."""
        self.turn = turn
        """When it is the turn of its client, see `FairQueue`."""
        self._parent = parent
        self._may_fork = new.may_fork
        self._is_open = False
        self._has_been_open = False
        self._has_drafts = True
        self._has_source = False
        self._losses = 0
        self._lost_row: VerifyRow | None = None
        self.deferrals = 0
        """How often others went first since the target last got further with the sequence."""
        self._deferred_until = 0.0

    @property
    def id(self) -> SequenceId:
        """The id of its sequence."""
        return self.sequence.id

    @property
    def order(self) -> tuple[int, int, int]:
        """The order in which sequences are served: smaller goes first."""
        return self.sequence.request.priority, self.turn, self.sequence.arrival

    @property
    def parent(self) -> LiveSequence | None:
        """The sequence whose stored KV it may share when it is first sent to the target; `None` from then on."""
        return self._parent

    @property
    def may_fork(self) -> bool:
        """Whether later sequences may share its KV: until then it is kept, even when it has finished."""
        return self._may_fork

    @property
    def is_open(self) -> bool:
        """Whether the target may hold KV of the sequence."""
        return self._is_open

    @property
    def has_been_open(self) -> bool:
        """Whether the target ever held KV of the sequence. Opening it again then follows a preemption or a loss."""
        return self._has_been_open

    @property
    def losses(self) -> int:
        """Calls that were lost with this sequence in them since the target last got further with it."""
        return self._losses

    @property
    def is_quarantined(self) -> bool:
        """Whether the sequence is sent alone, and from its start instead of opened, because of lost calls."""
        return self._losses >= QUARANTINE_LOSSES

    @property
    def max_draft_tokens(self) -> int | None:
        """Most nodes of a tree that the request allows; `None` leaves it to the server.

        0 once a call was lost with the sequence alone in it: its drafts may be the cause, and none may cost an answer.
        """
        return self.sequence.request.max_draft_tokens if self._has_drafts else 0

    @property
    def kv_source(self) -> LiveSequence | None:
        """The parent, if the target may still hold KV of it."""
        return self._parent if self._parent is not None and self._parent.is_open else None

    def mark_sent(self) -> None:
        """Record that the target may hold KV of the sequence from now on."""
        self._has_source = self._has_source or self.kv_source is not None  # a fork reads the source of its parent
        self._is_open = self._has_been_open = True
        self._parent = None

    def mark_stored(self, stored_len: int) -> None:
        """Record that the target holds the first `stored_len` tokens."""
        self.sequence.opened(stored_len)

    def mark_released(self) -> None:
        """Record that the target holds no KV of the sequence."""
        self.sequence.opened(0)
        self._is_open = self._has_source = False

    def mark_forked(self) -> None:
        """Record that no later sequence will share the KV of this one."""
        self._may_fork = False

    def is_deferred(self, now: float) -> bool:
        """Whether others go first: the target was not ready for the sequence."""
        return now < self._deferred_until

    def defer(self, until: float) -> None:
        """Let others go first until then."""
        self.deferrals += 1
        self._deferred_until = until

    def record_loss(self, row: VerifyRow | None = None) -> int:
        """Record that a call with a row of the sequence was lost, or one that computed nothing. Returns `losses`."""
        self._has_drafts = self._has_drafts and not self.is_quarantined
        self._losses += 1
        self._lost_row = row or self._lost_row
        return self._losses

    def record_progress(self, row: VerifyRow, accepted: int) -> None:
        """Record that the target has computed a row, and accepted so many of its drafted tokens.

        Losses count until it gets past the lost row: before, it may be lost there again.
        """
        self._has_source = True
        self.deferrals, self._deferred_until = 0, 0.0
        if self._lost_row is None or _is_past(self._lost_row, row, accepted):
            self._losses, self._lost_row = 0, None

    def largest_draft(self, max_draft: DraftBudget) -> DraftBudget:
        """Return the largest tree that the sequence can use, within the configuration's `max_draft`."""
        sequence = self.sequence
        return clip_draft(None, max_draft, self.max_draft_tokens, sequence.remaining)

    def view(self, draft: DraftBudget | None, now: float) -> SequenceView:
        """Return the scheduler's view now. `draft` is the tree size that the speculation controller chose."""
        sequence, source = self.sequence, self.kv_source
        shared = 0 if source is None else min(source.sequence.stored_len, len(sequence) - 1)
        return SequenceView(
            id=sequence.id,
            arrival=sequence.arrival,
            length=len(sequence),
            stored_len=sequence.stored_len,
            remaining=sequence.remaining,
            shared_len=shared,
            draft=draft,
            max_draft_tokens=self.max_draft_tokens,
            source_len=0 if self._has_source or source is not None else len(sequence.request.source),
            forced=len(sequence.forced),
            turn=self.turn,
            priority=sequence.request.priority,
            goes_last=self.is_deferred(now),
        )


def _is_past(lost: VerifyRow, row: VerifyRow, accepted: int) -> bool:
    """Whether a computed row has as much as a lost one, or the sequence is longer than that one could make it."""
    has_drafts = bool(row.tree) >= bool(lost.tree) and row.next_budget.max_nodes >= min(1, lost.next_budget.max_nodes)
    longest = lost.base_len + lost.tree.depth() + lost.next_budget.max_depth
    return row.base_len + accepted >= longest or (row.base_len >= lost.base_len and has_drafts)
