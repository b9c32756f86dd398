"""What grammars and bad texts allow at the decisions of a step's rows, found while a GPU computes the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core.drafting import RowFaultCode
from cluster.core.errors import ConfigurationError
from cluster.core.tree import EMPTY_TREE
from cluster.core.verification import Verdict, VerifyRow
from workers.verify.forbidden import ForbiddenTexts
from workers.verify.grammars import GrammarMasks, Grammars, Outcome
from workers.verify.sequence_state import ReadyRow, SequenceState
from workers.verify.verdicts import fault_verdict


class Constraints:
    """Excludes tokens at the decisions of rows whose requests have a grammar or bad texts."""

    def __init__(self, grammars: Grammars, forbidden: ForbiddenTexts) -> None:
        self._grammars = grammars
        self._forbidden = forbidden

    def refused(self, rows: Sequence[tuple[VerifyRow, SequenceState]]) -> list[Verdict | None]:
        """Return the verdicts on rows of a step that need not be computed, since their grammar is not or cannot be
        compiled. All ranks call this and agree.
        """
        found = self._grammars.begin(rows)
        return [_refusal(row, sequence, masks) for (row, sequence), masks in zip(rows, found, strict=True)]

    def applied(self, ready: Sequence[ReadyRow]) -> list[ReadyRow]:
        """Return the rows of a step with what is allowed at each decision. All ranks call this and agree.

        A draft with which a grammar is too complex is left out. A row that cannot be decided has a `fault`.
        """
        samplings = (entry.sequence.start.sampling for entry in ready)
        if not any(sampling.grammar is not None or sampling.bad_texts for sampling in samplings):
            return list(ready)
        masks = self._grammars.masks([(entry.row, entry.sequence) for entry in ready])
        return [self._applied(entry, found) for entry, found in zip(ready, masks, strict=True)]

    def _applied(self, entry: ReadyRow, masks: GrammarMasks) -> ReadyRow:
        row = entry.row
        if (fault := _refusal(row, entry.sequence, masks)) is not None:
            return replace(entry, fault=fault)
        if masks.outcome is Outcome.ROOT:  # no draft fails a request
            row = replace(row, tree=EMPTY_TREE, distributions=())
        try:
            allowed = self._forbidden.without(row, entry.sequence, masks.allowed[: 1 + len(row.tree)])
        except ConfigurationError as error:
            stored = len(entry.sequence.tokens)
            return replace(entry, fault=fault_verdict(row, RowFaultCode.INVALID, f"bad_texts: {error}", stored))
        return replace(entry, row=row, allowed=allowed)


def _refusal(row: VerifyRow, sequence: SequenceState, masks: GrammarMasks) -> Verdict | None:
    """The verdict on a row whose grammar is not compiled or has failed."""
    if masks.outcome is Outcome.WAITS:
        return fault_verdict(row, RowFaultCode.NOT_READY, "its grammar is being compiled", len(sequence.tokens))
    if masks.outcome is Outcome.FAILED:
        return fault_verdict(row, RowFaultCode.INVALID, f"grammar: {masks.reason}", len(sequence.tokens))
    return None
