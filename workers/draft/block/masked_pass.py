"""The passes of public block drafters, DFlash, DFlash2 and DSpark; see `MaskedBlockShape`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.draft.block.block_passes import BlockPasses
from workers.draft.common.modules.context_window import WHOLE_TEXT, ContextRows, ContextShape, ContextWindow
from workers.draft.common.modules.decoder_stack import BiasedProduct, DecoderStack
from workers.draft.common.modules.layer_stack import RotaryTable
from workers.draft.common.modules.module_settings import Weights
from workers.draft.common.modules.product import entry_weights
from workers.model.drafting.ends import TargetEnds, rms_norm
from workers.model.drafting.fusion import public_fusion
from workers.model.drafting.public import PublicModule
from workers.model.public_shapes import MaskedBlockShape
from workers.transfer import onto


class MaskedBlockPass(BlockPasses):
    """The weights of a public block drafter, packed, and its two passes."""

    def __init__(
        self,
        module: PublicModule,
        ends: TargetEnds,
        weights: Weights,
        directory: str | None = None,
        *,
        takes_features: bool = False,
    ) -> None:
        """`directory` keeps the compiled CPU kernels. `takes_features`: the target fuses the taps."""
        shape = module.shape
        if not isinstance(shape, MaskedBlockShape):
            raise TypeError(f"{type(shape).__name__} is no shape of a block drafter")
        body = shape.body
        self._shape, self._epsilon = shape, body.norm_epsilon
        self.depths, self.slots, self.vocabulary_size = shape.depths, shape.slots, len(ends.embedding)
        self.device = ends.embedding.device
        self._embedding = ends.embedding
        mask = module.get("mask_embedding")
        mask = ends.embedding[shape.mask_token] if mask is None else mask
        self._masks = shape.embedding_scale * mask.float().expand(shape.slots - 1, -1)
        self._takes_features = takes_features
        self._fuse = public_fusion(module, BiasedProduct(module, ["fc"], entry_weights(weights), directory))
        self._output_norm = module.tensors["norm.weight"].float()
        layers = [f"layers.{number}.self_attn" for number in range(body.layers)]
        names = [f"{layer}.{part}_proj" for layer in layers for part in "kv"]
        self._context = BiasedProduct(module, names, weights, directory)
        norms = torch.stack([module.tensors[f"{layer}.k_norm.weight"] for layer in layers])
        self._key_norms = norms.float().unsqueeze(1)  # [layers, 1, head width]
        self._rotary = RotaryTable(body.rope, body.head_width, self.device)
        self._layers = DecoderStack(module, body, weights, directory)
        self.context_shape = ContextShape(body.layers, body.kv_heads, body.head_width, 0, WHOLE_TEXT, shape.slots)
        """What is kept of each position; there is no feature."""

    def context(self, taps: Tensor, positions: Tensor) -> ContextRows:
        """What later blocks need of `taps` [tokens, taps, hidden size] at `positions` [tokens].

        If the target fuses them, they are features [tokens, 1, feature size].
        """
        fused = onto(self.device, taps[:, 0]).float() if self._takes_features else self._fuse(taps)
        width = self._shape.body.head_width
        found = self._context(fused).view(len(fused), len(self._key_norms), 2, -1, width)
        keys = rms_norm(found[:, :, 0], self._key_norms, self._epsilon)  # [tokens, layers, KV heads, head width]
        turned = self._rotary.at(onto(self.device, positions)).apply(keys.flatten(1, 2)).view_as(keys)
        return ContextRows(turned.permute(1, 2, 0, 3), found[:, :, 1].permute(1, 2, 0, 3), fused[:, :0])

    def _features(self, anchors: Sequence[int], windows: Sequence[ContextWindow]) -> Tensor:  # noqa: ARG002
        return self._masks.new_empty((len(anchors), 0))

    def _entered(self, features: Tensor, last: Tensor) -> Tensor:  # noqa: ARG002 - there is none
        tokens = self._shape.embedding_scale * self._embedding[last].float().unsqueeze(1)
        return torch.cat([tokens, self._masks.expand(len(last), -1, -1)], dim=1).flatten(0, 1)
