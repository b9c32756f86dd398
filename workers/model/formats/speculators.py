"""The format of the library `speculators` (Red Hat): a `speculators_model_type` and a nested configuration of layers.

https://github.com/vllm-project/speculators defines it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.drafting import Tap
from workers.model.draft_card import DraftDescription
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.decoder_config import DECODER_KEYS
from workers.model.formats.eagle3_layout import EAGLE3_KEYS, Eagle3Layout
from workers.model.formats.registry import DraftWeights, register

_TYPE, _BODY = "speculators_model_type", "transformer_layer_config"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_KNOWN = EAGLE3_KEYS | {_LAYERS, "embed_requires_grad"}
_LAYOUT = Eagle3Layout("layers.0.")


class SpeculatorsFormat:
    """Checkpoints with a `speculators_model_type`."""

    name = "speculators"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether the configuration names a type of this library."""
        return _TYPE in checkpoint.config

    def kind(self, checkpoint: Checkpoint) -> str:
        """The kind of a type; see `DraftFormat.kind`."""
        checkpoint.allow(_TYPE, "eagle3")
        return "eagle"

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        """Describe the draft; see `DraftFormat.card`."""
        checkpoint.allow(_TYPE, "eagle3")
        checkpoint.refuse_unknown_keys(_KNOWN)
        if checkpoint.config.get("norm_before_residual") is None:
            checkpoint.refuse("norm_before_residual", "it must be true or false: engines differ in what they assume")
        body = checkpoint.nested(_BODY)
        body.refuse_unknown_keys(DECODER_KEYS)
        each, joint = checkpoint.flag("fc_norm"), checkpoint.flag("norm_before_fc")
        if each and joint:
            checkpoint.refuse("norm_before_fc", "it must be false where fc_norm is true")
        verifier = checkpoint.nested("speculators_config").nested("verifier").config.get("name_or_path")
        return _LAYOUT.card(
            checkpoint,
            checkpoint,
            body,
            taps or checkpoint.numbers(_LAYERS) or (),
            tap_norm="each" if each else "joint" if joint else "none",
            target=verifier if isinstance(verifier, str) else "",
        )

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        """Read the draft; see `DraftFormat.weights`."""
        return _LAYOUT.weights(checkpoint, card)


register(SpeculatorsFormat())
