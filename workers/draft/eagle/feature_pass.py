"""The passes of public heads that read features of the target: EAGLE-1, EAGLE-3, P-EAGLE, MTP; see `FeatureShape`."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from workers.draft.common.modules.context_window import WHOLE_TEXT, ContextShape
from workers.draft.common.modules.decoder_stack import BiasedProduct, DecoderStack
from workers.draft.common.modules.module_settings import Weights
from workers.draft.common.modules.product import entry_weights, make_product
from workers.draft.eagle.head_pass import HeadPass, wanted_rows
from workers.forward.window_attention import WindowAttention, WindowBuffers, WindowRows
from workers.model.drafting.ends import TargetEnds, rms_norm
from workers.model.drafting.fusion import public_fusion
from workers.model.drafting.public import PublicModule
from workers.model.public_shapes import MASK_HIDDEN, FeatureShape
from workers.transfer import row_indices


class FeaturePass(HeadPass):
    """The weights of a head, packed. It computes what `EaglePass` computes for modules of `pilotfish distill`."""

    def __init__(
        self, module: PublicModule, ends: TargetEnds, weights: Weights, scratch: int, directory: str | None = None
    ) -> None:
        """`scratch` is the largest number of tokens of one sequence in a pass, and in a draft.

        `directory` keeps the compiled CPU kernels.
        """
        shape = module.shape
        if not isinstance(shape, FeatureShape):
            raise TypeError(f"{type(shape).__name__} is no shape of a head that drafts token by token")
        body = shape.body
        self._shape, self._epsilon = shape, body.norm_epsilon
        self.vocabulary_size, self.hidden_size = len(ends.embedding), body.hidden_size
        self.device = ends.embedding.device
        self._ends = ends
        self._stored: tuple[Weights, str | None] = weights, directory
        self._pack(module)
        self._head = make_product(ends.head, weights, directory)
        hidden = module.get(MASK_HIDDEN)
        self._mask = None
        if shape.mask_token is not None and hidden is not None:
            self._mask = shape.mask_token, self.features(hidden.view(1, shape.taps, -1))
        self.context_shape = ContextShape(body.layers, body.kv_heads, body.head_width, 0, WHOLE_TEXT, scratch)
        self.is_trainable = shape.is_trainable
        """Whether its weights can be learned."""
        self.depths = shape.depths
        """Tokens that one pass predicts with mask tokens; 0 for a head that drafts token by token."""

    def with_weights(self, module: PublicModule) -> FeaturePass:
        """Passes with the weights of `module`, a head without a mask token; both share embedding and output head."""
        other = copy(self)
        other.graphs = None
        other._pack(module)
        return other

    def _pack(self, module: PublicModule) -> None:
        weights, directory = self._stored
        self._entry = BiasedProduct(module, ["fc"], entry_weights(weights), directory)
        self._layers = DecoderStack(module, self._shape.body, *self._stored)
        self._embedding_norm, self._feature_norm, self._output_norm = map(
            module.norm, ("embedding_norm", "feature_norm", "norm")
        )
        self._fuse = public_fusion(module, self._entry) if self._shape.taps else None

    @property
    def mask(self) -> tuple[int, Tensor]:
        """The mask token, and the feature [1, hidden size] beside it. Raises `TypeError` for a head without one."""
        if self._mask is None:
            raise TypeError("a head that drafts token by token has no mask token")
        return self._mask

    def features(self, taps: Tensor) -> Tensor:
        if self._fuse is not None:
            return self._fuse(taps)
        return self._ends.final_states(taps[:, -1])

    @property
    def windows(self) -> WindowAttention | None:
        return self._layers.windows

    def launched(self, features: Tensor, rows: WindowRows) -> Tensor:
        residual, inputs = self._entered(features, row_indices(rows.tokens, self._ends.embedding))
        outputs = self._layers.run(residual, rows.positions, rows.pieces, inputs)
        return self._fed(wanted_rows(outputs, rows))

    def computed(self, inputs: WindowBuffers) -> Tensor:
        residual, first_inputs = self._entered(inputs.features, inputs.tokens)
        return self._fed(self._layers.computed(residual, inputs.step, first_inputs)[inputs.wanted])

    def logits(self, outputs: Tensor) -> Tensor:
        return self._head(outputs if self._shape.feeds_normed else self._normalised(outputs))

    def _entered(self, features: Tensor, following: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream before the layers, and what the first attention reads where it is not that stream.

        `following` [tokens] are the next tokens.
        """
        normed, tokens = features, self._ends.embedding[following].float()
        if self._embedding_norm is not None and self._feature_norm is not None:
            tokens = rms_norm(tokens, self._embedding_norm, self._epsilon)
            normed = rms_norm(features, self._feature_norm, self._epsilon)
        joined = torch.cat([tokens, normed], dim=-1)
        if self._shape.entry == "wide":
            return (normed if self._shape.keeps_normed_residual else features), joined
        return self._entry(joined), None

    def _fed(self, outputs: Tensor) -> Tensor:
        """The outputs as the head, and the features of the next tokens, read them."""
        return self._normalised(outputs) if self._shape.feeds_normed else outputs

    def _normalised(self, outputs: Tensor) -> Tensor:
        return outputs if self._output_norm is None else rms_norm(outputs, self._output_norm, self._epsilon)
