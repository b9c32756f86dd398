"""What the passes of all block drafters have in common. Blocks of recurring numbers of rows run as CUDA graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from workers.draft.common.modules.captured_windows import CapturedWindows
from workers.draft.common.modules.context_session import ContextSession
from workers.draft.common.modules.context_window import ContextRows, ContextShape, ContextWindow
from workers.draft.common.modules.decoder_stack import DecoderStack
from workers.draft.common.modules.layer_stack import LayerStack
from workers.forward.captured_passes import GraphCapture
from workers.forward.graph_sizes import drafting_graph_sizes
from workers.forward.window_attention import WindowBuffers, WindowRows
from workers.model.drafting.ends import rms_norm
from workers.transfer import row_indices

StoredPart = tuple[ContextSession, int, int]
"""A session, the first of some positions, and their number."""
_FEW = 64
"""Most positions of a session that are stored together with those of others."""


class BlockPasses(ABC):
    """The weights of a block drafter on its device, and its two passes."""

    depths: int
    """Tokens that are predicted: those of the last slots."""
    slots: int
    """Tokens of a block in a pass."""
    vocabulary_size: int
    device: torch.device
    context_shape: ContextShape
    """What is kept of each position."""
    graphs: CapturedWindows | None = None
    """The captured passes. They compute with the weights that these passes were loaded with."""
    _embedding: Tensor
    _layers: LayerStack | DecoderStack
    _output_norm: Tensor
    _epsilon: float

    @abstractmethod
    def context(self, taps: Tensor, positions: Tensor) -> ContextRows:
        """What later blocks need of `taps` [tokens, taps, hidden size] at `positions` [tokens]."""

    @abstractmethod
    def _features(self, anchors: Sequence[int], windows: Sequence[ContextWindow]) -> Tensor:
        """What the blocks read of the positions before their anchors, float32 [rows, feature size]."""

    @abstractmethod
    def _entered(self, features: Tensor, last: Tensor) -> Tensor:
        """The residual stream before the layers [rows × slots, hidden size]; `last` [rows] are the last tokens."""

    def capture(self, capture: GraphCapture | None) -> None:
        """Capture the passes. Without `capture`, and where torch attends to one block after another, none are."""
        windows = self._layers.windows
        if capture is None or windows is None or windows.kernels is None:
            return
        size = self.context_shape.feature_size
        self.graphs = CapturedWindows(self._outputs, windows, self.context_shape, size, capture)
        self.graphs.passes.capture_all([(one, None) for one in drafting_graph_sizes((self.slots,))])

    def store(self, parts: Sequence[StoredPart], rows: ContextRows) -> None:
        """Store `rows` of consecutive positions in sessions, and share full segments.

        `parts` are the sessions, first positions and numbers of positions, in the order of the rows. On a GPU, a few
        positions of each session are one launch for keys and values, and one for features.
        """
        windows, done = self._layers.windows, 0
        is_few = len({id(session) for session, _, _ in parts}) == len(parts) and all(
            count <= _FEW and session.window.receives(first, count) for session, first, count in parts
        )
        if windows is None or windows.kernels is None or not is_few:
            for session, first, count in parts:
                session.add(first, rows.part(done, done + count))
                done += count
            return
        received = [session.window.receive(first, count) for session, first, count in parts]
        keys, values = (one.transpose(1, 2) for one in (rows.keys, rows.values))
        windows.store([piece for piece, _ in received], keys, values)
        if rows.features.numel():
            given = torch.split(rows.features, [count for _, _, count in parts])
            torch._foreach_copy_([features for _, features in received], list(given))
        for session, first, count in parts:
            session.share(first, first + count)

    def draft(self, last: Sequence[int], anchors: Sequence[int], windows: Sequence[ContextWindow]) -> Tensor:
        """Normalised hidden vectors for the head, [rows, depths, hidden size], valid until the next pass.

        `last` are the last committed tokens, at the positions `anchors`. The features of the positions before the
        anchors must be known, if there are features. A block attends to itself in both directions.
        """
        features, slots = self._features(anchors, windows), self.slots
        rows = WindowRows(
            [window.block(anchor, slots) for window, anchor in zip(windows, anchors, strict=True)],
            [anchor + slot for anchor in anchors for slot in range(slots)],
            last,
            (),
        )
        found = None if self.graphs is None else self.graphs.run(None, features, rows)
        hidden = self._launched(features, rows) if found is None else found[0][: len(rows.positions)]
        return hidden.view(len(last), slots, -1)[:, slots - self.depths :]

    def _launched(self, features: Tensor, rows: WindowRows) -> Tensor:
        """The hidden vectors of all slots [rows × slots, hidden size], each kernel launched by itself."""
        residual = self._entered(features, row_indices(rows.tokens, self._embedding))
        return self._normalised(self._layers.run(residual, rows.positions, rows.pieces))

    def _outputs(self, inputs: WindowBuffers, _: Hashable) -> Sequence[Tensor]:
        """The hidden vectors of all slots, from buffers."""
        rows = inputs.size.rows
        residual = self._entered(inputs.features[:rows], inputs.tokens[:rows])
        return [self._normalised(self._layers.computed(residual, inputs.step))]

    def _normalised(self, residual: Tensor) -> Tensor:
        return rms_norm(residual, self._output_norm, self._epsilon)
