"""Medusa heads (Cai et al. 2024) in the four layouts that are in use. Their configurations do not tell their sizes.

https://github.com/FasterDecoding/Medusa stores `{head}.{block}.linear` and an output head of each as `{head}.{blocks}`;
its second trainer stores blocks alone, and the target's head serves them; merged models have the prefix `medusa_head.`.
vLLM's converter stored `blocks.{head}.layers.{block}` and `lm_heads.{head}`, with `token_map` for fewer tokens; with
`original_lm_head`, `lm_heads.0` alone serves all heads. `write_medusa` writes this last layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.core.drafting import Tap
from workers.model.draft_card import WEIGHTS, WRITER, WRITTEN_BY, DraftDescription, read_tree
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.registry import DraftWeights, register
from workers.model.public_shapes import MedusaShape, Sizes
from workers.model.weight_files import CONFIG

if TYPE_CHECKING:
    from torch import Tensor

_MERGED = "medusa_head."
"""Begins the names of heads in the checkpoint of their target."""
_PREFIXES = (_MERGED, "medusa_heads.", "")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)|blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"(\d+)\.(\d+)\.weight|lm_heads\.(\d+)\.weight")
_HEAD_NAME = ".head.weight"
"""Ends the name of the output head of a depth, as the shape names it."""
_OWN_BLOCK = re.compile(r"\d+\.\d+\.weight")
"""The matrix of a block, as the shape names it."""
_MAP = "token_map"
_SHARED, _COMMON_HEAD = "original_lm_head", "lm_heads.0.weight"
"""The key that says that one output head serves all heads, and the name of this head."""
_CHOICES = "medusa_choices"
"""The key of a static tree: the ranks along the path to each node, as the authors' `medusa_choices.py` lists them."""
_LAST_TAP: tuple[Tap, ...] = (-1,)


class MedusaFormat:
    """Checkpoints such as `FasterDecoding/medusa-vicuna-7b-v1.3`."""

    name = "medusa"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether there is a residual block of a head."""
        prefix = _prefix(checkpoint)
        return any(f"{prefix}{name}" in checkpoint.sizes for name in ("0.0.linear.weight", "blocks.0.layers.0.weight"))

    def kind(self, _: Checkpoint) -> str:
        """The kind of all of them."""
        return "heads"

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        """Describe the heads; see `DraftFormat.card`. Their number is that of the stored ones."""
        if _prefix(checkpoint) != _MERGED:
            checkpoint.refuse_unknown_keys(("medusa_fc_bias", _SHARED, "hidden_act"))
        checkpoint.allow("hidden_act", "silu")
        names, sizes = _stored(checkpoint), checkpoint.sizes
        is_shared = checkpoint.flag(_SHARED)
        if is_shared and [name for name in names if name.endswith(_HEAD_NAME)] != [f"0{_HEAD_NAME}"]:
            checkpoint.refuse(_SHARED, f"it must be false unless {_COMMON_HEAD} is the only output head")
        blocks = [name.split(".") for name in names if _OWN_BLOCK.fullmatch(name)]
        size = sizes[names["0.0.weight"]][0]
        depths, deep = (len({name[part] for name in blocks}) for part in (0, 1))
        rows = sizes[names["0.head.weight"]][0] if "0.head.weight" in names else 0
        shape = MedusaShape(size, depths, deep, 0 if is_shared else rows, has_bias="0.0.bias" in names)
        tokens = sizes[names[_MAP]][0] if _MAP in names else None
        wanted: Sizes = shape.tensors() | ({} if tokens is None else {_MAP: (rows,)})
        if is_shared:
            wanted[f"0{_HEAD_NAME}"] = (rows, size)
        missing, strange = sorted(wanted.keys() - names.keys()), sorted(names.keys() - wanted.keys())
        if missing or strange:
            checkpoint.fail(f"its heads lack {missing[:3] or 'nothing'} and have {strange[:3] or 'nothing'} in excess")
        for name, wanted_size in wanted.items():
            if sizes[names[name]] != wanted_size:
                checkpoint.fail(f"{names[name]} must be {list(wanted_size)}, not {list(sizes[names[name]])}")
        named = checkpoint.config.get("vocab_size")
        vocabulary = named if isinstance(named, int) and not isinstance(named, bool) else 0
        if tokens is not None and not vocabulary:
            checkpoint.refuse("vocab_size", f"it must be set where there is a {_MAP}")
        return DraftDescription(
            str(checkpoint.config.get("base_model_name_or_path") or ""),
            vocabulary if tokens is not None else rows or vocabulary,
            size,
            (),
            tokens,
            kind="heads",
            taps=tuple(taps) or _LAST_TAP,
            shape=shape,
            tree=read_tree(checkpoint.directory / CONFIG, checkpoint.config, _CHOICES),
        )

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        """Read the heads; see `DraftFormat.weights`. Rows of a `token_map` are put into the order of their tokens."""
        names = _stored(checkpoint)
        stored = checkpoint.weights([name for own, name in names.items() if own != _MAP])
        if _MAP in names:
            stored |= checkpoint.tensors([names[_MAP]])
        found = {name: stored[names[name]] for name in names}
        tokens, common = found.pop(_MAP, None), None
        if checkpoint.flag(_SHARED):
            common = found.pop(f"0{_HEAD_NAME}")
        if tokens is None:
            return DraftWeights(found, head=common)
        vocabulary, order = tokens.long().sort()
        if bool((vocabulary.diff() <= 0).any()) or int(vocabulary[0]) < 0:
            checkpoint.fail(f"{_MAP} must hold each token once")
        if int(vocabulary[-1]) >= card.target_vocabulary_size:
            checkpoint.fail(f"{_MAP} must hold tokens below {card.target_vocabulary_size}")
        return DraftWeights(
            {name: value[order] if name.endswith(_HEAD_NAME) else value for name, value in found.items()},
            vocabulary,
            head=None if common is None else common[order],
        )


def _prefix(checkpoint: Checkpoint) -> str:
    return next(one for one in _PREFIXES if not one or any(name.startswith(one) for name in checkpoint.sizes))


def _stored(checkpoint: Checkpoint) -> dict[str, str]:
    """The names in the files of the tensors of the heads, by the names of the shape.

    A tensor with another name keeps it, and so is refused. Those of the target in a merged model are left out.
    """
    prefix, found = _prefix(checkpoint), dict[str, str]()
    for name in checkpoint.sizes:
        if not name.startswith(prefix):
            if prefix != _MERGED:
                found[name] = name
            continue
        own = name.removeprefix(prefix)
        block, head = _BLOCK.fullmatch(own), _HEAD.fullmatch(own)
        if block is not None:
            depth, number, part = (one for one in block.groups() if one is not None)
            found[f"{depth}.{number}.{part}"] = name
        elif head is not None:
            found[f"{next(one for one in head.groups() if one is not None)}.head.weight"] = name
        else:
            found[own] = name
    return found


def write_medusa(
    directory: Path, card: DraftDescription, blocks: Tensor, head: Tensor, vocabulary: Tensor | None
) -> None:
    """Write heads of one residual block each, in bfloat16, into an existing directory.

    `blocks` [depths, hidden size, hidden size] are the matrices of the blocks, without biases; `head`
    [draft vocabulary, hidden size] is the output head of all depths, and `vocabulary` [draft vocabulary] the tokens of
    its rows.
    """
    import torch
    from safetensors.torch import save_file

    from workers.model.tensor_file import in_bfloat16

    parts = {f"blocks.{depth}.layers.0.weight": block for depth, block in enumerate(blocks)} | {_COMMON_HEAD: head}
    tensors = in_bfloat16(parts)
    if vocabulary is not None:
        tensors[_MAP] = vocabulary.to("cpu", torch.int64).contiguous()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": card.target,
        "hidden_size": card.hidden_size,
        "vocab_size": card.target_vocabulary_size,
        "truncated_vocab_size": len(head),
        "num_heads": len(blocks),
        "num_hidden_layers": 1,
        "medusa_fc_bias": False,
        _SHARED: True,
        "torch_dtype": "bfloat16",
        WRITER: WRITTEN_BY,
    }
    if card.tree:
        config[_CHOICES] = card.tree
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


register(MedusaFormat())
