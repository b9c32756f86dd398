"""An EAGLE head's passes for serving; see `EagleHead`, whose results these are."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from workers.draft.common.modules.context_window import ContextShape
from workers.draft.common.modules.layer_stack import LayerStack
from workers.draft.common.modules.module_settings import Weights
from workers.draft.common.modules.product import make_product
from workers.draft.eagle.head_pass import HeadPass, wanted_rows
from workers.forward.native.packed_linear import InputNorm
from workers.forward.window_attention import WindowAttention, WindowBuffers, WindowRows
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.layer import DrafterLayer
from workers.transfer import onto, row_indices


class EaglePass(HeadPass):
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

    def with_weights(self, module: EagleHead) -> EaglePass:
        """Passes with the weights of `module`, but with this norm before the target's head; they share both."""
        other = copy(self)
        other.graphs = None
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

    @property
    def windows(self) -> WindowAttention | None:
        return self._layers.windows

    def launched(self, features: Tensor, rows: WindowRows) -> Tensor:
        residual = self._entered(features, row_indices(rows.tokens, self._embedding))
        return wanted_rows(self._layers.run(residual, rows.positions, rows.pieces), rows)

    def computed(self, inputs: WindowBuffers) -> Tensor:
        residual = self._entered(inputs.features, inputs.tokens)
        return self._layers.computed(residual, inputs.step)[inputs.wanted]

    def logits(self, outputs: Tensor) -> Tensor:
        return self._head(outputs)

    def _entered(self, features: Tensor, following: Tensor) -> Tensor:
        """The residual stream before the layers [tokens, hidden size]; `following` [tokens] are the next tokens."""
        return self._entry(torch.cat([self._embedding[following].float(), features], dim=-1))
