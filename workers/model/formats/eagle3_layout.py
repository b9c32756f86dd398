"""What all EAGLE-3 checkpoints share (Li et al. 2025): the shape of the head, its tensors, and its vocabulary.

P-EAGLE checkpoints are EAGLE-3 with learned taps, which stand beside a mask token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.drafting import Tap
from workers.model.draft_card import DraftDescription
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.decoder_config import decoder_shape
from workers.model.formats.draft_vocabulary import MAPS, ends_sizes, read_with_ends
from workers.model.formats.registry import DraftWeights
from workers.model.public_shapes import MASK_HIDDEN, FeatureShape, Sizes, TapNorm

EAGLE3_KEYS = frozenset(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
"""The keys of EAGLE-3 and EAGLE-3.1 that change the arithmetic."""
_DEFAULT_TAPS: tuple[Tap, ...] = (2, "middle", -4)
"""The inputs of the layers 2, L // 2 and L - 3 of a target with L layers."""
PARALLEL_KEYS = ("pard_token", "ptd_token_id")
"""Keys of a mask token that only models for parallel drafting have."""
MASK_KEYS = ("mask_token_id", *PARALLEL_KEYS)
"""The keys of P-EAGLE's mask token: that of `speculators`, and those that vLLM reads."""
_DEPTHS = 8
"""Tokens that trainers of P-EAGLE predict with one pass, where a checkpoint does not tell it."""
_MOST_DEPTHS = 64
_OWN_NAMES = {"embedding_norm.weight": "input_layernorm.weight", "feature_norm.weight": "hidden_norm.weight"}


@dataclass(frozen=True, slots=True)
class Eagle3Layout:
    """How one format of EAGLE-3 names its parts."""

    first: str
    """Begins the names of the first layer."""
    tap_norms: tuple[str, ...] = ()
    """The names of the norms of single taps; empty: `fc_norm.0` and so on."""

    depths: int | None = None
    """Tokens that one pass of P-EAGLE predicts, if the checkpoint tells it."""

    def stored(self, name: str) -> str:
        """The name in the files of a tensor of the shape."""
        if name in _OWN_NAMES:
            return self.first + _OWN_NAMES[name]
        if name.startswith("layers.0."):
            return self.first + name.removeprefix("layers.0.")
        if self.tap_norms and name.startswith("fc_norm."):
            return f"{self.tap_norms[int(name.split('.')[1])]}.weight"
        return name

    def card(
        self,
        checkpoint: Checkpoint,
        config: Checkpoint,
        body: Checkpoint,
        taps: Sequence[Tap],
        *,
        tap_norm: TapNorm,
        target: str = "",
    ) -> DraftDescription:
        """The card of a checkpoint whose own keys are in `config` and those of its layers in `body`.

        `taps` are empty where the checkpoint has no list of them; they are then the common ones. Raises
        `ModelLoadError`.
        """
        chosen = tuple(taps) or _DEFAULT_TAPS
        vocabulary, size = body.count("vocab_size"), body.count("hidden_size")
        target_size = config.count("target_hidden_size", size)
        reduced = config.reduced_vocabulary(vocabulary)
        layers = body.layers(1)
        shape = FeatureShape(
            body=decoder_shape(body, checkpoint.sizes, layers=layers, first=self.first),
            entry="wide",
            taps=len(chosen),
            target_hidden_size=target_size,
            tap_norm=tap_norm,
            has_entry_bias=config.flag("bias"),
            keeps_normed_residual=config.flag("norm_before_residual"),
            feeds_normed=config.flag("norm_output"),
            mask_token=_mask_token(config, vocabulary) if MASK_HIDDEN in checkpoint.sizes else None,
            depths=min(self.depths or _DEPTHS, _MOST_DEPTHS) if MASK_HIDDEN in checkpoint.sizes else 0,
        )
        sizes: Sizes = {self.stored(name): size for name, size in shape.tensors().items()}
        sizes |= ends_sizes(checkpoint, vocabulary, reduced, size, target_size)
        checkpoint.check_tensors(sizes, MAPS)
        return DraftDescription(
            target,
            vocabulary,
            target_size,
            (),
            reduced if reduced < vocabulary else None,
            kind="eagle",
            taps=chosen,
            shape=shape,
        )

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        """The tensors of a checkpoint with this card. Raises `ModelLoadError`."""
        return read_with_ends(checkpoint, card, self.stored)


def tap_norm_of(config: Checkpoint, each: bool) -> TapNorm:
    """The norm of taps. `each`: whether each of them has its own. Raises `ModelLoadError` where there are two norms."""
    joint = config.flag("norm_before_fc")
    if each and joint:
        config.refuse("norm_before_fc", "it must be false where fc_norm is true")
    return "each" if each else "joint" if joint else "none"


def _mask_token(config: Checkpoint, vocabulary: int) -> int:
    """The mask token of P-EAGLE. Raises `ModelLoadError` unless a key names one."""
    named = next((key for key in MASK_KEYS if config.config.get(key) is not None), MASK_KEYS[0])
    return config.token(named, vocabulary)
