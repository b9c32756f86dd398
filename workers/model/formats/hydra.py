"""Hydra heads (Ankner et al. 2024) as their authors store them: `hydra_mlp.{head}.{block}` and `hydra_lm_head.{head}`.

https://github.com/zankner/Hydra (`hydra/model`) defines the names. Heads of one MLP that read the drafted tokens are
served; those with a prefix layer, with attention, or that read the target's state alone are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cluster.core.drafting import Tap
from workers.model.draft_card import DraftDescription
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.draft_vocabulary import read_with_ends
from workers.model.formats.registry import DraftWeights, register
from workers.model.public_shapes import HydraShape

_FIRST = "hydra_mlp.0.0.linear.weight"
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_ARCHITECTURE, _GROUNDED, _OFFSET = "hydra_head_arch", "grounded_heads", "hidden_state_offset"
_LAST_TAP: tuple[Tap, ...] = (-1,)
_WITHOUT_CONTEXT = "must be 'mlp', because heads are served without keys and values of the text's tokens"
_REFUSED = {
    "prefix-mlp": f"its heads read a decoder layer over the whole text (prefix_embeding_layer); it {_WITHOUT_CONTEXT}",
    "cross-attn": f"its heads attend to the whole text; it {_WITHOUT_CONTEXT}",
    "eagle-attn": f"its heads attend to the whole text; it {_WITHOUT_CONTEXT}",
}
"""Why an architecture of heads is not served."""


class HydraFormat:
    """Checkpoints such as `ankner/hydra-vicuna-7b-v1.3`."""

    name = "hydra"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether the configuration or the weights are of such heads."""
        return _ARCHITECTURE in checkpoint.config or _FIRST in checkpoint.sizes

    def kind(self, _: Checkpoint) -> str:
        """The kind of all of them."""
        return "heads"

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        """Describe the heads; see `DraftFormat.card`. Their number is that of the stored ones."""
        checkpoint.refuse_unknown_keys((_ARCHITECTURE, _GROUNDED, _OFFSET))
        architecture = checkpoint.config.get(_ARCHITECTURE)
        if isinstance(architecture, str) and architecture in _REFUSED:
            checkpoint.refuse(_ARCHITECTURE, _REFUSED[architecture])
        checkpoint.allow(_ARCHITECTURE, "mlp")
        if checkpoint.config.get(_GROUNDED) is not True:
            checkpoint.refuse(_GROUNDED, "it must be true: heads that read no drafted token are Medusa's")
        checkpoint.allow(_OFFSET, 0)
        blocks = [found.groups() for name in checkpoint.sizes if (found := _BLOCK.fullmatch(name))]
        head = checkpoint.sizes.get("hydra_lm_head.0.weight")
        if not blocks or head is None or len(head) != 2:
            checkpoint.fail(f"its weights lack {_FIRST if not blocks else 'the matrix hydra_lm_head.0.weight'}")
        depths, deep = (len({numbers[part] for numbers in blocks}) for part in (0, 1))
        rows, size = head
        shape = HydraShape(size, depths, deep, rows)
        checkpoint.check_tensors({_stored(name): wanted for name, wanted in shape.tensors().items()})
        return DraftDescription(
            str(checkpoint.config.get("base_model_name_or_path") or ""),
            rows,
            size,
            (),
            None,
            kind="heads",
            taps=tuple(taps) or _LAST_TAP,
            shape=shape,
        )

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        return read_with_ends(checkpoint, card, _stored)


def _stored(name: str) -> str:
    """The name in the files of a tensor of the shape."""
    depth, _, part = name.partition(".")
    return f"hydra_lm_head.{depth}.{part.removeprefix('head.')}" if part.startswith("head.") else f"hydra_mlp.{name}"


register(HydraFormat())
