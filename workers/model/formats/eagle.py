"""EAGLE-1 and EAGLE-2 as their authors store them (Li et al. 2024): a matrix over embedding and feature, then a layer.

https://github.com/SafeAILab/EAGLE (`eagle/model/cnets1.py`) defines the names. EAGLE-2 differs by its trees alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core.drafting import Tap
from workers.model.draft_card import DraftDescription
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.decoder_config import DECODER_KEYS, decoder_shape
from workers.model.formats.draft_vocabulary import ends_sizes, read_with_ends
from workers.model.formats.registry import DraftWeights, register
from workers.model.public_shapes import FeatureShape

_FIRST = "layers.0."
_QKV_BIAS = "qkv_bias"
"""Whether queries, keys and values have biases: the authors' own key, for heads of Qwen2."""
_LAST_TAP: tuple[Tap, ...] = (-1,)


class EagleFormat:
    """Checkpoints such as `yuhuili/EAGLE-LLaMA3-Instruct-8B`."""

    name = "eagle"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether a matrix enters a first layer that normalises nothing before its attention."""
        sizes = checkpoint.sizes
        if "speculators_model_type" in checkpoint.config:
            return False
        has = {"fc.weight", f"{_FIRST}self_attn.q_proj.weight"} <= sizes.keys()
        return has and not any(
            f"{one}norm.weight" in sizes for one in ("hidden_", f"{_FIRST}hidden_", f"{_FIRST}input_layer")
        )

    def kind(self, _: Checkpoint) -> str:
        """The kind of all of them."""
        return "eagle"

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        """Describe the head; see `DraftFormat.card`. Without the key `bias`, the matrix that enters has a bias."""
        checkpoint.refuse_unknown_keys(DECODER_KEYS | {"bias", _QKV_BIAS})
        vocabulary, size = checkpoint.count("vocab_size"), checkpoint.count("hidden_size")
        body = decoder_shape(checkpoint, checkpoint.sizes, layers=checkpoint.layers(1), first=_FIRST)
        if checkpoint.flag(_QKV_BIAS):
            body = replace(body, has_qkv_bias=True)
        shape = FeatureShape(
            body=body,
            entry="joined",
            taps=0,
            target_hidden_size=size,
            has_entry_bias=checkpoint.flag("bias", True),
            has_entry_norms=False,
            has_first_norm=False,
            has_output_norm=False,
        )
        checkpoint.check_tensors(shape.tensors() | ends_sizes(checkpoint, vocabulary, vocabulary, size, size))
        return DraftDescription(
            "",
            vocabulary,
            size,
            (),
            None,
            kind="eagle",
            taps=tuple(taps) or _LAST_TAP,
            shape=shape,
        )

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        return read_with_ends(checkpoint, card)


register(EagleFormat())
