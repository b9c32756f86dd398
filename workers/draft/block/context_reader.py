"""Takes the hidden states in the rows of one call, and computes the context of all rows in one pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cluster.core.drafting import DraftRow
from workers.draft.common.modules.context_session import ContextSession
from workers.draft.common.modules.context_window import ContextRows
from workers.draft.common.modules.tap_reader import TapReader

ComputeContext = Callable[[Tensor, Tensor], ContextRows]
"""Computes what is kept of positions from their taps [tokens, taps, hidden size] and the positions [tokens]."""


class ContextReader:
    """Collects taps, row by row, and stores their context in the sessions."""

    def __init__(self, taps: TapReader, compute: ComputeContext) -> None:
        self._taps = taps
        self._compute = compute
        self._found: list[tuple[ContextSession, int, Tensor]] = []

    def take(self, session: ContextSession, row: DraftRow) -> None:
        """Take the hidden states of one row, those of its tokens.

        Raises `ValueError` for hidden states of a wrong width; then nothing of the row is taken.
        """
        taken: list[tuple[ContextSession, int, Tensor]] = []
        for evidence in row.evidence:
            found = self._taps.read(evidence)
            if found is None:
                continue
            first, taps = found
            taps = taps[: max(0, len(session.tokens) - first)]
            if len(taps):
                taken.append((session, first, taps))
        self._found += taken

    def store(self) -> None:
        """Compute the context of everything that was taken and store it."""
        if not self._found:
            return
        found, self._found = self._found, []
        positions = [begin + index for _, begin, taps in found for index in range(len(taps))]
        rows = self._compute(torch.cat([taps for _, _, taps in found]), torch.tensor(positions))
        done = 0
        for session, begin, taps in found:
            session.add(begin, rows.part(done, done + len(taps)))
            done += len(taps)
