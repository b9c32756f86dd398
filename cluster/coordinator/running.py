"""One sequence on its way through the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.scheduler import SequenceView
from cluster.core.sequence import Sequence

if TYPE_CHECKING:
    from cluster.coordinator.output_stream import Stream


class Lane:
    """A request has one lane, or several side by side that begin alike (samples, beams)."""

    __slots__ = ("answer", "draft", "expects_heirs", "is_open", "losses", "parent", "sequence", "stream", "was_open")

    def __init__(
        self, sequence: Sequence, stream: Stream, answer: int | None, parent: Lane | None, expects_heirs: bool
    ) -> None:
        self.sequence = sequence
        self.stream = stream
        self.answer = answer
        """The index of the answer it writes; `None` for a beam, which is nobody's answer yet."""
        self.parent = parent
        """Whose stored KV it may share when it is sent to the target; `None` from then on."""
        self.expects_heirs = expects_heirs
        """Whether lanes may be born that share its KV: until then it is kept, even when it has ended."""
        self.is_open = False
        """Whether the target may hold something of it."""
        self.was_open = False
        """Whether it ever did: what is opened again was preempted or lost."""
        self.losses = 0
        """Calls in a row that were lost with this sequence in them."""
        self.draft: DraftBudget | None = None
        """How large a tree the controller wants for it; `None` leaves it to the configuration."""

    @property
    def id(self) -> SequenceId:
        """Its sequence's."""
        return self.sequence.id

    @property
    def source(self) -> Lane | None:
        """The parent, if it still holds something to share."""
        return self.parent if self.parent is not None and self.parent.is_open else None

    def touch(self) -> None:
        """The target may hold something of it from now on."""
        self.is_open = self.was_open = True
        self.parent = None

    def most(self, limit: DraftBudget) -> DraftBudget:
        """The largest tree that would be of use within `limit`, the request's own bound and what it may still write."""
        asked = self.sequence.request.max_draft_tokens
        nodes = limit.max_nodes if asked is None else min(asked, limit.max_nodes)
        depth = min(limit.max_depth, nodes, self.sequence.remaining - 1)
        return DraftBudget(nodes, depth) if depth > 0 else NO_DRAFT

    def view(self) -> SequenceView:
        """What the scheduler may know of it."""
        sequence, source = self.sequence, self.source
        shared = 0 if source is None else min(source.sequence.stored_len, len(sequence) - 1)
        return SequenceView(
            sequence.id,
            sequence.arrival,
            len(sequence),
            sequence.stored_len,
            sequence.remaining,
            shared,
            sequence.request.max_draft_tokens if self.draft is None else self.draft.max_nodes,
            None if self.draft is None else self.draft.max_depth,
        )
