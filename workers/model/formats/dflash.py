"""DFlash and DFlash2 as their authors store them (Chen et al. 2026), and DSpark as SpecForge does: a `dflash_config`.

https://github.com/z-lab/dflash (`dflash/model.py`) defines the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.core.drafting import Tap
from cluster.core.errors import shorten
from workers.model.draft_card import DraftDescription
from workers.model.formats.block_layout import (
    BLOCK_KEYS,
    SCALE_KEYS,
    SELECTOR_KEYS,
    block_card,
    has_block,
)
from workers.model.formats.checkpoint import Checkpoint, read_pickled
from workers.model.formats.decoder_config import DECODER_KEYS
from workers.model.formats.draft_vocabulary import read_with_ends
from workers.model.formats.layer_lists import INPUTS, LIST_KEYS, UNSETTLED, named_taps, refuse_unsettled
from workers.model.formats.registry import DraftWeights, register
from workers.model.public_shapes import MaskedBlockShape

if TYPE_CHECKING:
    from torch import Tensor

MASK_EMBEDDING = "mask_embedding.pt"
"""Name of the file with a vector that takes the place of the mask token's embedding."""
MASK = "mask_embedding"
"""Name of this vector [hidden size] among the tensors of the drafter."""
_NESTED, _PROJECTOR = "dflash_config", "projector_type"
_DSPARK = "dspark"


class DFlashFormat:
    """Checkpoints such as `z-lab/Qwen3-8B-DFlash-b16`."""

    name = "dflash"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether fused taps are normalised, and the settings of blocks are nested."""
        return _NESTED in checkpoint.config and has_block(checkpoint)

    def kind(self, _: Checkpoint) -> str:
        """The kind of all of them."""
        return "block"

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        """Describe the drafter; see `DraftFormat.card`. A nested key takes the place of the same key at top level."""
        nested = checkpoint.nested(_NESTED)
        checkpoint.refuse_unknown_keys(DECODER_KEYS | BLOCK_KEYS | LIST_KEYS | {UNSETTLED})
        nested.refuse_unknown_keys(BLOCK_KEYS | SELECTOR_KEYS | SCALE_KEYS | LIST_KEYS - {INPUTS} | {UNSETTLED})
        nested.allow(_PROJECTOR, "dflash", _DSPARK)
        given = {key: value for key, value in nested.config.items() if value is not None}
        config = Checkpoint(checkpoint.directory, {**checkpoint.config, **given})
        _check_architecture(config)
        card = block_card(
            checkpoint,
            config,
            checkpoint,
            tuple(taps) or _named_taps(config),
            predicts_next=given.get(_PROJECTOR) == _DSPARK,
        )
        if isinstance(card.shape, MaskedBlockShape) and (checkpoint.directory / MASK_EMBEDDING).is_file():
            return replace(card, shape=replace(card.shape, has_mask_embedding=True))
        return card

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        found = read_with_ends(checkpoint, card)
        if isinstance(card.shape, MaskedBlockShape) and card.shape.has_mask_embedding:
            vector = _mask_embedding(checkpoint, card.shape)
            return replace(found, tensors={**found.tensors, MASK: vector})
        return found


def _check_architecture(config: Checkpoint) -> None:
    """Raise `ModelLoadError` for DFlash2 without its keys."""
    named = config.config.get("architectures")
    is_second = isinstance(named, list) and any("DFlash2" in str(one) for one in named)
    for key in SELECTOR_KEYS if is_second else ():
        if config.config.get(key) is None:
            config.refuse(f"{_NESTED}.{key}", "it must be set")


def _named_taps(config: Checkpoint) -> tuple[int, ...]:
    """The taps of a list of layers, or those that the authors choose without one. Raises `ModelLoadError`."""
    refuse_unsettled(config, UNSETTLED, "block")
    found = named_taps(config)
    if not found and config.config.get("num_target_layers") is None:
        config.refuse("target_layer_ids", "it must be set, or num_target_layers")
    return found or _default_taps(config.count("num_target_layers"), config.layers())


def _default_taps(target_layers: int, layers: int) -> tuple[int, ...]:
    """The outputs of as many layers as the drafter has, spread from the second to the third last one."""
    if layers == 1:
        return (target_layers // 2 + 1,)
    return tuple(1 + round(1 + number * (target_layers - 4) / (layers - 1)) for number in range(layers))


def _mask_embedding(checkpoint: Checkpoint, shape: MaskedBlockShape) -> Tensor:
    """The vector in `mask_embedding.pt`, read without running its code: a tensor, or one beside the token's id."""
    import torch

    try:
        found = read_pickled(checkpoint.directory / MASK_EMBEDDING)
    except Exception as error:  # the reader of a broken or hostile file may raise anything
        checkpoint.fail(f"{MASK_EMBEDDING} cannot be read as plain tensors: {error}")
    token = shape.mask_token
    if isinstance(found, dict):
        token, found = found.get("mask_token_id", token), found.get("embedding")
    size = shape.body.hidden_size
    if not isinstance(found, torch.Tensor) or not found.is_floating_point() or found.numel() != size:
        checkpoint.fail(f"{MASK_EMBEDDING} must hold one vector of {size} elements")
    if not isinstance(token, int) or token != shape.mask_token:
        checkpoint.fail(f"{MASK_EMBEDDING} is of the token {shorten(token)}; mask_token_id is {shape.mask_token}")
    return found.flatten().clone()


register(DFlashFormat())
