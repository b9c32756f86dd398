"""EAGLE-3 as its authors, SpecForge and NVIDIA store it (Li et al. 2025): `midlayer`, `fc`, `norm`, `lm_head`, `d2t`.

P-EAGLE in this layout, as SpecForge stores it, has `mask_hidden` as well.

https://github.com/SafeAILab/EAGLE (`eagle/model/cnets.py`) defines the names. Defaults are those of vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.drafting import Tap
from workers.model.draft_card import DraftDescription
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.decoder_config import DECODER_KEYS
from workers.model.formats.eagle3_layout import EAGLE3_KEYS, MASK_KEYS, Eagle3Layout, tap_norm_of
from workers.model.formats.layer_lists import INPUTS, LIST_KEYS, UNSETTLED, named_taps, refuse_unsettled
from workers.model.formats.registry import DraftWeights, register

_FIRST = ("midlayer.", "layers.0.")
_UNSETTLED = (INPUTS, UNSETTLED)
"""Lists of layers in NVIDIA's nested section that engines do not read alike."""
_LEGACY_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
_KEYS = DECODER_KEYS | EAGLE3_KEYS | LIST_KEYS | {"eagle_config", "use_aux_norm", "bias", *MASK_KEYS}
_NESTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Keys of NVIDIA's nested section, with the only value of each that is computed here."""
_HEAD_LAYERS = "parallel_draft_heads_num_layers"
"""The layers of each further head of a step, of which there is none where a step predicts one token."""


class Eagle3Format:
    """Checkpoints such as `yuhuili/EAGLE3-LLaMA3.1-Instruct-8B`."""

    name = "eagle3"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether the first layer normalises a hidden state beside its input."""
        if "speculators_model_type" in checkpoint.config:
            return False
        return any(f"{first}hidden_norm.weight" in checkpoint.sizes for first in _FIRST)

    def kind(self, _: Checkpoint) -> str:
        """The kind of all of them."""
        return "eagle"

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        checkpoint.refuse_unknown_keys(_KEYS)
        _check_nested(checkpoint.nested("eagle_config"))
        return self._layout(checkpoint).card(
            checkpoint,
            checkpoint,
            checkpoint,
            tuple(taps) or _named_taps(checkpoint),
            tap_norm=tap_norm_of(checkpoint, checkpoint.flag("fc_norm") or checkpoint.flag("use_aux_norm")),
        )

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        return self._layout(checkpoint).weights(checkpoint, card)

    def stored_name(self, checkpoint: Checkpoint, name: str) -> str:
        """The name in the files of a tensor of the shape."""
        return self._layout(checkpoint).stored(name)

    def _layout(self, checkpoint: Checkpoint) -> Eagle3Layout:
        first = next(one for one in _FIRST if f"{one}hidden_norm.weight" in checkpoint.sizes)
        is_legacy = f"{_LEGACY_NORMS[0]}.weight" in checkpoint.sizes
        return Eagle3Layout(first, _LEGACY_NORMS if is_legacy else ())


def _check_nested(config: Checkpoint) -> None:
    for key, value in _NESTED.items():
        config.allow(key, value)
    config.refuse_unknown_keys((*_UNSETTLED, *_NESTED, _HEAD_LAYERS))


def _named_taps(config: Checkpoint) -> tuple[int, ...]:
    """The taps of lists whose meaning all engines agree on. Raises `ModelLoadError` for another list."""
    for key in _UNSETTLED:
        refuse_unsettled(config.nested("eagle_config"), key, "eagle")
    return named_taps(config)


register(Eagle3Format())
