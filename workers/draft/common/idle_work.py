"""Optional work of a drafting method between calls, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from cluster.core.ids import SequenceId


@runtime_checkable
class IdleWork(Protocol):
    """Optional work of a `DraftMethod` between calls. Each piece is short, so that the next call hardly waits."""

    def catch_up(self, sequence_ids: Sequence[SequenceId]) -> bool:
        """Compute some committed tokens of these sequences that `propose` has not computed yet.

        Returns false when nothing is left or there is no room. Unknown sequences are no error.
        """

    def run_ahead(self) -> bool:
        """Do one piece of work that makes the next proposals ready sooner.

        Returns false when there is none left before the next `propose`.
        """
