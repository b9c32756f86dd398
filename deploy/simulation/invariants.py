"""What must hold in every simulated run, whatever fails."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.core.drafting import Proposal
from cluster.core.ids import SequenceId
from cluster.core.verification import VerifyRow


class Ledger:
    """Records violations, and the proposals that rows may carry."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._base_lens: dict[SequenceId, int] = {}
        self._proposed: dict[SequenceId, dict[int, set[int]]] = {}

    def violate(self, text: str) -> None:
        """Record that an invariant does not hold."""
        self.violations.append(text)

    def note_proposal(self, proposal: Proposal) -> None:
        """Record a proposal that has reached its coordinator."""
        if proposal.tree.tokens:
            tokens = self._proposed.setdefault(proposal.sequence_id, {}).setdefault(proposal.base_len, set())
            tokens.update(proposal.tree.tokens)

    def check_rows(self, rows: Iterable[VerifyRow]) -> None:
        """Check the rows of a step: the committed length never falls, and drafts grew from it."""
        for row in rows:
            if not row.decide:
                continue
            before = self._base_lens.get(row.sequence_id, 0)
            if row.base_len < before:
                self.violate(f"the committed length of {row.sequence_id} fell from {before} to {row.base_len}")
            self._base_lens[row.sequence_id] = row.base_len
            proposed = self._proposed.get(row.sequence_id)
            if row.tree.tokens and not (proposed and proposed.get(row.base_len, set()).issuperset(row.tree.tokens)):
                self.violate(f"a draft of {row.sequence_id} did not grow from its {row.base_len} committed tokens")
            if proposed and row.base_len > before:
                for base_len in [length for length in proposed if length < row.base_len]:
                    del proposed[base_len]
