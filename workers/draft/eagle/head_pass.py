"""What the passes of all heads that draft token by token have in common. Recurring sizes run as CUDA graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from workers.draft.common.modules.captured_windows import CapturedWindows
from workers.draft.common.modules.context_window import ContextShape, ContextWindow
from workers.forward.captured_passes import GraphCapture
from workers.forward.graph_sizes import MOST_RANKED, drafting_graph_sizes, widths_up_to
from workers.forward.native.window_layers import WindowPiece
from workers.forward.window_attention import WindowAttention, WindowBuffers, WindowRows
from workers.transfer import rows_of


@dataclass(frozen=True, slots=True)
class EaglePiece:
    """Consecutive tokens of one sequence in a pass."""

    window: WindowPiece
    following: Sequence[int]
    """For each token, the token one position later."""
    positions: Sequence[int]
    wanted: Sequence[int]
    """The tokens whose outputs are wanted, by index."""


def committed_piece(window: ContextWindow, first: int, following: Sequence[int], reach: int) -> EaglePiece:
    """A piece of committed tokens, the first one at position `first`; each attends to `reach` positions with its own.

    The output of the last one is wanted.
    """
    count = len(following)
    keys, values, begin = window.scratch(first, count)
    known = np.concatenate([window.known_before(first), np.ones(count, dtype=np.bool_)])
    slots, own = np.arange(begin + count)[None, :], begin + np.arange(count)[:, None]
    is_seen = torch.from_numpy(known[None, :] & (slots <= own) & (slots > own - reach))
    window_piece = WindowPiece(keys, values, begin, count, is_seen)
    return EaglePiece(window_piece, following, range(first, first + count), (count - 1,))


def rows_of_pass(pieces: Sequence[EaglePiece]) -> WindowRows:
    """All pieces, one after another."""
    starts = accumulate((piece.window.count for piece in pieces), initial=0)
    return WindowRows(
        [piece.window for piece in pieces],
        [position for piece in pieces for position in piece.positions],
        [token for piece in pieces for token in piece.following],
        [start + index for start, piece in zip(starts, pieces, strict=False) for index in piece.wanted],
    )


def wanted_rows(outputs: Tensor, rows: WindowRows) -> Tensor:
    """The wanted ones [wanted, hidden size] of the outputs [tokens, hidden size] of all pieces."""
    return rows_of(outputs, rows.wanted)


class HeadPart(IntEnum):
    """What a captured pass computes."""

    OUTPUTS = 0
    RANKED = 1
    """The outputs, and their logits."""


class HeadPass(ABC):
    """The weights of a head on its device, and its passes."""

    vocabulary_size: int
    device: torch.device
    context_shape: ContextShape
    """What is kept of each position; there is no feature."""
    graphs: CapturedWindows | None = None
    """The captured passes. They compute with the weights that this pass was loaded with."""

    @property
    @abstractmethod
    def windows(self) -> WindowAttention | None:
        """What attends where the CPU kernels do not compute the layers."""

    @abstractmethod
    def features(self, taps: Tensor) -> Tensor:
        """Features [tokens, hidden size] of taps [tokens, taps, target's hidden size]."""

    @abstractmethod
    def launched(self, features: Tensor, rows: WindowRows) -> Tensor:
        """What `run` returns, each kernel launched by itself."""

    @abstractmethod
    def computed(self, inputs: WindowBuffers) -> Tensor:
        """What `run` returns, from buffers: all that this launches can be captured."""

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [rows, draft vocabulary] of outputs [rows, hidden size]."""

    def capture(self, capture: GraphCapture | None, width: int, most: int) -> None:
        """Capture passes over committed tokens, and those that expand up to `most` nodes of each tree.

        `width` is the hidden size; `most` is 0 for a head that expands none. Without `capture`, and where torch attends
        to one piece after another, nothing is captured.
        """
        windows = self.windows
        if capture is None or windows is None or windows.kernels is None:
            return
        self.graphs = CapturedWindows(self._outputs, windows, self.context_shape, width, capture)
        keys = [(size, HeadPart.OUTPUTS) for size in drafting_graph_sizes()]
        if most:
            keys += [(size, HeadPart.RANKED) for size in drafting_graph_sizes(widths_up_to(most), MOST_RANKED)]
        self.graphs.passes.capture_all(keys)

    def run(self, features: Tensor, pieces: Sequence[EaglePiece]) -> Tensor:
        """Write the keys and values of all pieces. Returns the wanted outputs [wanted, hidden size].

        `features` [tokens, hidden size] are those of all pieces, one after another. No two pieces share a window.
        """
        rows = rows_of_pass(pieces)
        found = None if self.graphs is None else self.graphs.run(HeadPart.OUTPUTS, features, rows)
        return self.launched(features, rows) if found is None else found[0][: len(rows.wanted)].clone()

    def expand(self, features: Tensor, pieces: Sequence[EaglePiece]) -> tuple[Tensor, Tensor]:
        """What `run` returns, and the logits of these outputs, which are valid until the next pass."""
        rows = rows_of_pass(pieces)
        found = None if self.graphs is None else self.graphs.run(HeadPart.RANKED, features, rows)
        if found is not None:
            own_outputs, own_logits = (one[: len(rows.wanted)] for one in found)
            return own_outputs.clone(), own_logits
        outputs = self.launched(features, rows)
        return outputs, self.logits(outputs)

    def _outputs(self, inputs: WindowBuffers, part: Hashable) -> Sequence[Tensor]:
        outputs = self.computed(inputs)
        return [outputs] if part is HeadPart.OUTPUTS else [outputs, self.logits(outputs)]
