"""The input buffers of a CUDA graph for a backend that packs rows: what it plans of every step is copied into them.

Behind the step's own tokens, rows and tiles there is padding. Padding tokens are stored in the scratch block, which no
sequence holds, and attend to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from workers.forward.backends.base import AttentionBackend
from workers.forward.graph_sizes import GraphSize
from workers.forward.layout import RowShape
from workers.forward.recurrence.plan import RecurrenceBuffers
from workers.transfer import StepArray, joined, split_together, words_together


class PackedBuffers:
    """The buffers of one graph size."""

    def __init__(self, size: GraphSize, backend: AttentionBackend[Any], device: torch.device) -> None:
        self.size = size
        self._backend = backend
        arrays, self._metadata = self._planned((), (), (), ())
        self._numbers = torch.zeros(words_together(arrays), dtype=torch.int64, device=device)
        tokens, positions, self.selected, *self._parts = split_together(self._numbers, arrays)
        self.tokens, self.positions = tokens[None], positions[None]
        """`[1, tokens]`, `[1, tokens]`; `selected` is `[selected]`."""
        self.recurrence = RecurrenceBuffers(size.rows, size.tokens, device)
        """What recurrent layers do, which is filled for models that have some."""

    def fill(
        self, rows: Sequence[RowShape], tokens: Sequence[int], positions: Sequence[int], selected: Sequence[int]
    ) -> None:
        """Copy a step that fits into the buffers, in one piece. The host does not wait for the copy."""
        arrays, _ = self._planned(rows, tokens, positions, selected)
        # torch does not reuse pinned memory before the copy has finished.
        self._numbers.copy_(joined(arrays, self._numbers.device), non_blocking=True)

    def metadata(self) -> Any:
        """The backend's metadata of what is in the buffers."""
        return self._metadata(self._parts)

    def _planned(
        self, rows: Sequence[RowShape], tokens: Sequence[int], positions: Sequence[int], selected: Sequence[int]
    ) -> tuple[list[StepArray], Any]:
        planned, size = self._backend.plan_packed(rows, self.size), self.size
        inputs: list[StepArray] = [
            np.zeros(length, dtype=np.int64) for length in (size.tokens, size.tokens, size.selected)
        ]
        for array, values in zip(inputs, (tokens, positions, selected), strict=True):
            array[: len(values)] = values
        return [*inputs, *planned.arrays], planned.metadata
