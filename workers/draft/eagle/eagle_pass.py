"""An EAGLE head's passes for serving; see `EagleHead`, whose results these are."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from workers.draft.common.modules.context_window import ContextShape, ContextWindow
from workers.draft.common.modules.layer_stack import LayerStack
from workers.draft.common.modules.module_settings import Weights
from workers.draft.common.modules.product import make_product
from workers.forward.native.packed_linear import InputNorm
from workers.forward.native.window_layers import WindowPiece
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.layer import DrafterLayer
from workers.transfer import onto, row_indices, rows_of


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


def tokens_and_positions(pieces: Sequence[EaglePiece]) -> tuple[list[int], list[int]]:
    """The following token and the position of each token of all pieces, one piece after another."""
    following = [token for piece in pieces for token in piece.following]
    return following, [position for piece in pieces for position in piece.positions]


def wanted_rows(outputs: Tensor, pieces: Sequence[EaglePiece]) -> Tensor:
    """The wanted ones [wanted, hidden size] of the outputs [tokens, hidden size] of all pieces."""
    starts = accumulate((piece.window.count for piece in pieces), initial=0)
    return rows_of(
        outputs, [start + index for start, piece in zip(starts, pieces, strict=False) for index in piece.wanted]
    )


class EaglePass:
    """The weights of an EAGLE head, packed."""

    def __init__(
        self, module: EagleHead, ends: TargetEnds, weights: Weights, scratch: int, directory: str | None = None
    ) -> None:
        """`scratch` is the largest number of tokens of one sequence in a pass, and in a draft.

        `directory` keeps the compiled CPU kernels.
        """
        shape, layer = module.shape, module.shape.layer
        self.vocabulary_size = len(ends.embedding)
        self.device = ends.embedding.device
        self._embedding = ends.embedding
        self._stored: tuple[Weights, str | None] = weights, directory
        self._pack(module)
        output = InputNorm(module.output_norm, layer.norm_epsilon, layer.hidden_size)
        self._head = make_product(ends.head, *self._stored, output)
        self.context_shape = ContextShape(shape.layers, layer.kv_heads, layer.head_width, 0, layer.window, scratch)
        """What is kept of each position; there is no feature."""

    def with_weights(self, module: EagleHead) -> EaglePass:
        """Passes with the weights of `module`, but with this norm before the target's head; they share both."""
        other = copy(self)
        other._pack(module)
        return other

    def _pack(self, module: EagleHead) -> None:
        size, epsilon = module.shape.layer.hidden_size, module.shape.layer.norm_epsilon
        taps = InputNorm(module.fusion.norm.flatten(), epsilon, size)
        feature = InputNorm(module.feature_norm, epsilon, size, size)  # after the embedding
        self._fuse = make_product(module.fusion.proj.weight, *self._stored, taps)
        self._entry = make_product(module.entry.weight, *self._stored, feature)
        layers = [one for one in module.layers if isinstance(one, DrafterLayer)]
        self._layers = LayerStack(layers, module.input_norms, *self._stored)

    def features(self, taps: Tensor) -> Tensor:
        """Features [tokens, hidden size] of taps [tokens, taps, hidden size]."""
        return self._fuse(onto(self.device, taps).float().flatten(1))

    def run(self, features: Tensor, pieces: Sequence[EaglePiece]) -> Tensor:
        following, positions = tokens_and_positions(pieces)
        tokens = self._embedding[row_indices(following, self._embedding)].float()
        residual = self._entry(torch.cat([tokens, features], dim=-1))
        return wanted_rows(self._layers.run(residual, positions, [piece.window for piece in pieces]), pieces)

    def logits(self, outputs: Tensor) -> Tensor:
        return self._head(outputs)
