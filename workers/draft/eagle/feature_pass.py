"""The passes of public heads that read features of the target: EAGLE-1, EAGLE-3, P-EAGLE, MTP; see `FeatureShape`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from workers.draft.common.modules.context_window import WHOLE_TEXT, ContextShape
from workers.draft.common.modules.decoder_stack import BiasedProduct, DecoderStack
from workers.draft.common.modules.module_settings import Weights
from workers.draft.common.modules.product import make_product
from workers.draft.eagle.eagle_pass import EaglePiece
from workers.model.drafting.ends import TargetEnds, rms_norm
from workers.model.drafting.fusion import public_fusion
from workers.model.drafting.public import PublicModule
from workers.model.public_shapes import MASK_HIDDEN, FeatureShape
from workers.transfer import onto, row_indices, rows_of


class FeaturePass:
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
        self.vocabulary_size = len(ends.embedding)
        self.vocabulary = ends.vocabulary
        self.device = ends.embedding.device
        self._ends = ends
        self._entry = BiasedProduct(module, ["fc"], weights, directory)
        self._layers = DecoderStack(module, body, weights, directory)
        self._head = make_product(ends.head, weights, directory)

        def norm(name: str) -> Tensor | None:
            found = module.get(f"{name}.weight")
            return None if found is None else found.float()

        self._embedding_norm, self._feature_norm, self._output_norm = map(
            norm, ("embedding_norm", "feature_norm", "norm")
        )
        self._fuse = public_fusion(module, self._entry) if shape.taps else None
        hidden = module.get(MASK_HIDDEN)
        self._mask = None
        if shape.mask_token is not None and hidden is not None:
            self._mask = shape.mask_token, self.features(hidden.view(1, shape.taps, -1))
        self.context_shape = ContextShape(body.layers, body.kv_heads, body.head_width, 0, WHOLE_TEXT, scratch)
        """What is kept of each position; there is no feature."""
        self.depths = shape.depths
        """Tokens that one pass predicts with mask tokens; 0 for a head that drafts token by token."""

    @property
    def mask(self) -> tuple[int, Tensor]:
        """The mask token, and the feature [1, hidden size] beside it. Raises `TypeError` for a head without one."""
        if self._mask is None:
            raise TypeError("a head that drafts token by token has no mask token")
        return self._mask

    def features(self, taps: Tensor) -> Tensor:
        """Features [tokens, hidden size] of taps [tokens, taps, target's hidden size]."""
        if self._fuse is not None:
            return self._fuse(taps)
        last, norm = onto(self.device, taps[:, -1]).float(), self._ends.norm
        return last if norm is None else rms_norm(last, norm.float(), self._ends.epsilon)

    def run(self, features: Tensor, pieces: Sequence[EaglePiece]) -> Tensor:
        """Write the keys and values of all pieces. Returns the wanted outputs [wanted, hidden size].

        `features` [tokens, hidden size] are those of all pieces, one after another. No two pieces share a window.
        """
        following = [token for piece in pieces for token in piece.following]
        positions = [position for piece in pieces for position in piece.positions]
        residual, inputs = self._entered(features, self._embedded(following, positions))
        outputs = self._layers.run(residual, positions, [piece.window for piece in pieces], inputs)
        starts = accumulate((piece.window.count for piece in pieces), initial=0)
        wanted = [start + index for start, piece in zip(starts, pieces, strict=False) for index in piece.wanted]
        outputs = rows_of(outputs, wanted)
        return self._normalised(outputs) if self._shape.feeds_normed else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [rows, draft vocabulary] of outputs [rows, hidden size]."""
        return self._head(outputs if self._shape.feeds_normed else self._normalised(outputs))

    def _embedded(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        found = self._ends.embedding[row_indices(tokens, self._ends.embedding)].float()
        if self._shape.hides_first_token and 0 in positions:
            found[row_indices([index for index, position in enumerate(positions) if position == 0], found)] = 0.0
        return found

    def _entered(self, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream before the layers, and what the first attention reads where it is not that stream."""
        normed = features
        if self._embedding_norm is not None and self._feature_norm is not None:
            tokens = rms_norm(tokens, self._embedding_norm, self._epsilon)
            normed = rms_norm(features, self._feature_norm, self._epsilon)
        joined = torch.cat([normed, tokens] if self._shape.is_hidden_first else [tokens, normed], dim=-1)
        if self._shape.entry == "wide":
            return (normed if self._shape.keeps_normed_residual else features), joined
        return self._entry(joined), None

    def _normalised(self, outputs: Tensor) -> Tensor:
        return outputs if self._output_norm is None else rms_norm(outputs, self._output_norm, self._epsilon)
