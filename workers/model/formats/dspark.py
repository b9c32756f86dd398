"""DSpark as its authors store it (DeepSeek): settings at the top level of a Qwen3 configuration.

https://github.com/deepseek-ai/DeepSpec (`deepspec/modeling/dspark`) defines the names. The same trainer's DFlash
checkpoints have this format too, without a Markov head.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.drafting import Tap
from workers.model.draft_card import DraftDescription
from workers.model.formats.block_layout import BLOCK_KEYS, block_card, has_block
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.decoder_config import DECODER_KEYS
from workers.model.formats.draft_vocabulary import read_with_ends
from workers.model.formats.layer_lists import LIST_KEYS, named_taps
from workers.model.formats.registry import DraftWeights, register

_GEMMA = "Gemma4"
_GEMMA_LAYERS = (
    "layers of Gemma 4 are not computed (norms after attention and MLP, scores without a scale, normalised values, "
    "GELU, a factor per layer, scaled embeddings): the layers must be Qwen3's"
)
"""Why a draft for Gemma 4, such as `deepseek-ai/dspark_gemma4_12b_block7`, is not served."""


class DSparkFormat:
    """Checkpoints such as `deepseek-ai/dspark_qwen3_8b_block7`."""

    name = "dspark"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether fused taps are normalised, and the settings of blocks are at the top level."""
        return "dflash_config" not in checkpoint.config and has_block(checkpoint)

    def kind(self, _: Checkpoint) -> str:
        """The kind of all of them."""
        return "block"

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        architectures = checkpoint.config.get("architectures")
        if isinstance(architectures, list) and any(str(one).startswith(_GEMMA) for one in architectures):
            checkpoint.refuse("architectures", _GEMMA_LAYERS)
        checkpoint.refuse_unknown_keys(DECODER_KEYS | BLOCK_KEYS | LIST_KEYS)
        if not isinstance(architectures, list) or not any("DSpark" in str(one) for one in architectures):
            checkpoint.refuse(
                "architectures",
                "it must name a DSpark model where dflash_config is missing: whether the last token's slot predicts a "
                "token depends on it",
            )
        for key in ("enable_confidence_head", "markov_rank"):
            if checkpoint.config.get(key) is None:
                checkpoint.refuse(key, "it must be set")
        chosen = tuple(taps) or named_taps(checkpoint)
        if not chosen:
            checkpoint.refuse("target_layer_ids", "it must be set")
        return block_card(checkpoint, checkpoint, checkpoint, chosen, predicts_next=True)

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        return read_with_ends(checkpoint, card)


register(DSparkFormat())
