"""A block drafter's passes for serving; see `BlockDrafter`, whose results these are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.draft.block.block_passes import BlockPasses
from workers.draft.common.modules.context_window import ContextRows, ContextShape, ContextWindow
from workers.draft.common.modules.layer_stack import LayerStack, RotaryTable
from workers.draft.common.modules.module_settings import Weights
from workers.draft.common.modules.product import make_product
from workers.forward.native.packed_linear import InputNorm
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.layer import ContextProjection, DrafterLayer
from workers.model.public_shapes import RopeShape
from workers.transfer import onto


class BlockPass(BlockPasses):
    """The weights of a block drafter, packed, and its two passes."""

    def __init__(self, module: BlockDrafter, ends: TargetEnds, weights: Weights, directory: str | None = None) -> None:
        """`directory` keeps the compiled CPU kernels."""
        shape, layer = module.shape, module.shape.layer
        self._layer_shape = layer
        self._epsilon = layer.norm_epsilon
        self.depths = self.slots = shape.block
        self.vocabulary_size = len(ends.embedding)
        self.device = ends.embedding.device
        self._embedding = ends.embedding
        layers = [one for one in module.layers if isinstance(one, DrafterLayer)]
        contexts = [one for one in module.contexts if isinstance(one, ContextProjection)]
        pairs = [weight for one in contexts for weight in (one.k_proj.weight, one.v_proj.weight)]
        size = layer.hidden_size
        taps = InputNorm(module.fusion.norm.flatten(), layer.norm_epsilon, size)
        self._context = make_product(torch.cat([module.fusion.proj.weight, *pairs]), weights, directory, taps)
        feature = InputNorm(module.feature_norm, layer.norm_epsilon, size, plain=size)  # after the embedding
        self._entry = make_product(module.entry.weight, weights, directory, feature)
        self._slot_vectors = module.slots.detach().float()
        self._layers = LayerStack(layers, module.input_norms, weights, directory)
        self._output_norm = module.output_norm.detach().float()
        self._rotary = RotaryTable(RopeShape(layer.rope_theta), layer.head_width, self.device)
        self.context_shape = ContextShape(
            shape.layers, layer.kv_heads, layer.head_width, layer.hidden_size, layer.window, shape.block
        )
        """What is kept of each position; the feature is its fused taps."""

    def context(self, taps: Tensor, positions: Tensor) -> ContextRows:
        shape = self._layer_shape
        found = self._context(onto(self.device, taps).float().flatten(1))
        fused, found = found[:, : shape.hidden_size].contiguous(), found[:, shape.hidden_size :]
        found = found.reshape(len(fused), -1, 2, shape.kv_heads, shape.head_width)  # [tokens, layers, 2, …]
        keys = found[:, :, 0].flatten(1, 2)  # [tokens, layers × KV heads, head width]
        keys = self._rotary.at(onto(self.device, positions)).apply(keys)
        return ContextRows(
            keys.view(len(fused), -1, shape.kv_heads, shape.head_width).permute(1, 2, 0, 3),
            found[:, :, 1].permute(1, 2, 0, 3),
            fused,
        )

    def _features(self, anchors: Sequence[int], windows: Sequence[ContextWindow]) -> Tensor:
        features = [window.feature(anchor - 1) for window, anchor in zip(windows, anchors, strict=True)]
        return torch.stack([feature for feature in features if feature is not None])

    def _entered(self, features: Tensor, last: Tensor) -> Tensor:
        common = self._entry(torch.cat([self._embedding[last].float(), features], dim=-1))
        return (common.unsqueeze(1) + self._slot_vectors).flatten(0, 1)
