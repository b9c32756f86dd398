"""The format of the library `speculators` (Red Hat): a `speculators_model_type` and a nested configuration of layers.

https://github.com/vllm-project/speculators defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.core.drafting import Tap
from workers.model.draft_card import DraftDescription
from workers.model.formats.block_layout import BLOCK_KEYS, block_card, block_weights
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.decoder_config import DECODER_KEYS
from workers.model.formats.eagle3_layout import EAGLE3_KEYS, MASK_KEYS, Eagle3Layout
from workers.model.formats.registry import DraftWeights, register
from workers.model.public_shapes import MASK_HIDDEN

_TYPE, _BODY = "speculators_model_type", "transformer_layer_config"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_BLOCK_LAYERS = "aux_hidden_state_layer_ids"
_KNOWN = EAGLE3_KEYS | {_LAYERS, "embed_requires_grad"}
_KNOWN_OF_BLOCKS = BLOCK_KEYS | {"sliding_window_non_causal"}
_LAYOUT = Eagle3Layout("layers.0.")
_EAGLE3, _PARALLEL = _HEADS_OF_FEATURES = ("eagle3", "peagle")
_BLOCKS = {"dflash": False, "dspark": True}
"""The types of block drafters, and whether a slot predicts the token after it where `sample_from_anchor` is unset."""
_HEADS: dict[str, Any] = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
"""What the library takes for DSpark's unset keys."""


class SpeculatorsFormat:
    """Checkpoints with a `speculators_model_type`."""

    name = "speculators"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether the configuration names a type of this library."""
        return _TYPE in checkpoint.config

    def kind(self, checkpoint: Checkpoint) -> str:
        """The kind of a type; see `DraftFormat.kind`."""
        return "eagle" if _type(checkpoint) in _HEADS_OF_FEATURES else "block"

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        """Describe the draft; see `DraftFormat.card`."""
        kind = _type(checkpoint)
        if kind not in _HEADS_OF_FEATURES:
            return _block(checkpoint, taps)
        checkpoint.refuse_unknown_keys(_KNOWN if kind == _EAGLE3 else {*_KNOWN, MASK_KEYS[0]})
        if (MASK_HIDDEN in checkpoint.sizes) != (kind == _PARALLEL):
            checkpoint.refuse(_TYPE, f"the weights must have {MASK_HIDDEN} for {_PARALLEL}, and for no other type")
        if checkpoint.config.get("norm_before_residual") is None:
            checkpoint.refuse("norm_before_residual", "it must be true or false: engines differ in what they assume")
        body = checkpoint.nested(_BODY)
        body.refuse_unknown_keys(DECODER_KEYS)
        each, joint = checkpoint.flag("fc_norm"), checkpoint.flag("norm_before_fc")
        if each and joint:
            checkpoint.refuse("norm_before_fc", "it must be false where fc_norm is true")
        return replace(_LAYOUT, depths=_proposed(checkpoint)).card(
            checkpoint,
            checkpoint,
            body,
            taps or checkpoint.numbers(_LAYERS) or (),
            tap_norm="each" if each else "joint" if joint else "none",
            target=_verifier(checkpoint),
        )

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        """Read the draft; see `DraftFormat.weights`."""
        return _LAYOUT.weights(checkpoint, card) if card.kind == "eagle" else block_weights(checkpoint, card)


def _type(checkpoint: Checkpoint) -> str:
    found, known = checkpoint.config[_TYPE], (*_HEADS_OF_FEATURES, *_BLOCKS)
    if found not in known:
        checkpoint.refuse(_TYPE, f"it must be one of {', '.join(known)}")
    return str(found)


def _verifier(checkpoint: Checkpoint) -> str:
    found = checkpoint.nested("speculators_config").nested("verifier").config.get("name_or_path")
    return found if isinstance(found, str) else ""


def _proposed(checkpoint: Checkpoint) -> int | None:
    """The tokens that a draft of this checkpoint has; `None` where it does not tell it. Raises `ModelLoadError`."""
    methods = checkpoint.nested("speculators_config").config.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    if not isinstance(first, dict) or first.get("speculative_tokens") is None:
        return None
    return Checkpoint(checkpoint.directory, first, "speculators_config.proposal_methods.0.").count("speculative_tokens")


def _block(checkpoint: Checkpoint, taps: Sequence[Tap]) -> DraftDescription:
    """The card of a block drafter."""
    kind = _type(checkpoint)
    checkpoint.refuse_unknown_keys(_KNOWN_OF_BLOCKS)
    body = checkpoint.nested(_BODY)
    body.refuse_unknown_keys(DECODER_KEYS)
    chosen = tuple(taps) or checkpoint.numbers(_BLOCK_LAYERS)
    if not chosen:
        checkpoint.refuse(_BLOCK_LAYERS, "it must be set")
    given = {key: value for key, value in checkpoint.config.items() if value is not None}
    unset = _HEADS if kind == "dspark" else dict.fromkeys(_HEADS)
    return block_card(
        checkpoint,
        Checkpoint(checkpoint.directory, {**unset, **given}),
        body,
        chosen,
        predicts_next=checkpoint.flag("sample_from_anchor", _BLOCKS[kind]),
        target=_verifier(checkpoint),
    )


register(SpeculatorsFormat())
