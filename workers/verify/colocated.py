"""Drafts on the target's rank 0: after each step, the drafting method proposes trees for the next one.

The verdict brings the proposal, so no message is sent for it and no round waits for another process. The method is the
same as in a process of its own; it sees the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cluster.core.drafting import (
    ANY_TOKENS,
    NO_DRAFT,
    DraftBudget,
    DraftRow,
    Evidence,
    NextTokens,
    Proposal,
    RowFaultCode,
)
from cluster.core.evidence_store import EvidenceStore
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.core.request import SequenceStart
from cluster.core.verification import VerifyRow

logger = logging.getLogger(__name__)

_MUCH_BYTES = 8 * 1024 * 1024
"""Bytes of hidden states of a sequence above which the method is shown them before a draft is asked for: no more are
kept, and a long prompt has more."""


@dataclass(frozen=True, slots=True)
class VerifiedRow:
    """A row of the step that has just been verified."""

    row: VerifyRow
    start: SequenceStart
    stored_tokens: Sequence[int]
    """The committed tokens whose KV is stored."""
    last_token: tuple[int, ...]
    """The last committed token, whose KV is not stored; empty after a row that decides nothing."""
    evidence: Evidence | None
    next_tokens: NextTokens = ANY_TOKENS
    """What the sequence's grammar says of the next draft."""

    @property
    def budget(self) -> DraftBudget:
        """The largest next draft: none after a row that decides nothing or ends the answer."""
        is_ended = self.last_token[-1:] and self.last_token[-1] in self.start.sampling.end_token_ids
        return self.row.next_budget if self.row.decide and not is_ended else NO_DRAFT


class ColocatedDrafter:
    """Brings the method up to date after every step and asks it for the next drafts.

    A method that raises costs drafts, never a verdict. A sequence that is the cause is sent to it anew, and after its
    second error it gets no more drafts. With `raises`, exceptions are raised instead. A method that computes on several
    ranks needs this: the other ranks wait for this one, and all of them must be restarted.
    """

    def __init__(self, method: DraftMethod, *, raises: bool = False) -> None:
        self._method = method
        self._raises = raises
        self._synced_lens: dict[SequenceId, int] = {}
        self._refused: set[SequenceId] = set()
        self._failed: set[SequenceId] = set()
        """Sequences that made the method raise once."""
        self._evidence = EvidenceStore(inf, inf)  # what is much is not kept

    def draft(self, verified: Sequence[VerifiedRow]) -> dict[SequenceId, Proposal]:
        """Propose trees for the rows whose `next_budget` is not empty.

        The evidence of other rows is kept until they have one, or until it is much.
        """
        for one in verified:
            if one.evidence is not None and one.row.sequence_id not in self._refused:
                self._evidence.add(one.row.sequence_id, one.evidence)
        rows = [self._row(one) for one in verified if self._is_shown(one)]
        if not rows:
            return {}
        found: dict[SequenceId, Proposal] = {}
        for row, proposal in self._proposed(rows):
            self._note(row, proposal)
            if row.budget.max_nodes and proposal.fault is None:
                found[row.sequence_id] = proposal
        return found

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free what the method stores for the sequences. Unknown sequences are no error."""
        known = [sequence_id for sequence_id in sequence_ids if sequence_id in self._synced_lens]
        for sequence_id in sequence_ids:
            self._synced_lens.pop(sequence_id, None)
            self._refused.discard(sequence_id)
            self._failed.discard(sequence_id)
            self._evidence.take(sequence_id)
        if known:
            try:
                self._method.release(known)
            except Exception:
                logger.exception("the drafter on the target could not release %d sequences", len(known))

    def _proposed(self, rows: Sequence[DraftRow]) -> list[tuple[DraftRow, Proposal]]:
        """The rows with their proposals. After an error each row is sent alone, without those that fail again."""
        try:
            return list(zip(rows, self._method.propose(rows), strict=True))
        except Exception:
            if self._raises:
                raise
            logger.exception("the drafter on the target failed with %d sequences", len(rows))
        found: list[tuple[DraftRow, Proposal]] = []
        for row in rows:
            try:
                found += zip([row], self._method.propose([row]), strict=True)
            except Exception:
                logger.exception("the drafter on the target failed with one sequence alone")
                self._note_failure(row.sequence_id)
        return found

    def _note_failure(self, sequence_id: SequenceId) -> None:
        """Drop the method's state of a sequence that made it raise. The second time, refuse the sequence."""
        is_second = sequence_id in self._failed
        self.release((sequence_id,))
        (self._refused if is_second else self._failed).add(sequence_id)

    def _is_shown(self, one: VerifiedRow) -> bool:
        """Whether the method gets the row now."""
        is_much = self._evidence.size(one.row.sequence_id) > _MUCH_BYTES
        return (one.budget.max_nodes > 0 or is_much) and one.row.sequence_id not in self._refused

    def _row(self, one: VerifiedRow) -> DraftRow:
        sequence_id = one.row.sequence_id
        synced = self._synced_lens.setdefault(sequence_id, 0)
        return DraftRow(
            sequence_id,
            len(one.stored_tokens) + len(one.last_token),
            (*one.stored_tokens[synced:], *one.last_token),
            one.budget,
            one.start if synced == 0 else None,
            self._evidence.take(sequence_id),
            one.next_tokens,
        )

    def _note(self, row: DraftRow, proposal: Proposal) -> None:
        fault = proposal.fault
        if fault is None:
            self._synced_lens[row.sequence_id] = row.base_len
        elif fault.code is RowFaultCode.INVALID:
            logger.warning("the drafter on the target cannot serve %s: %s", row.sequence_id, fault.message)
            self._refused.add(row.sequence_id)
        else:
            self._synced_lens[row.sequence_id] = 0
