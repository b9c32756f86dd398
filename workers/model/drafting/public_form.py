"""Which trained modules a public format describes, and what keeps the others out of one.

Medusa's format describes heads that add nothing to Medusa: no mixture of the last token and no selector. No public
format describes the other kinds: EAGLE-3 has the fused hidden states as its residual stream, where `EagleHead` has a
joint projection of embedding and fused states; DFlash and DSpark put a mask token's embedding into each slot, where
`BlockDrafter` has learned vectors on a joint projection.
"""

from __future__ import annotations

from pathlib import Path

from cluster.core.errors import ModelLoadError
from workers.model.draft_card import DraftCard, DraftDescription
from workers.model.draft_shapes import HeadsShape
from workers.model.public_shapes import MedusaShape
from workers.model.target_ends import decoder_layer_count, read_target_config


def obstacle(card: DraftCard, target_directory: Path, *, int8: bool) -> str:
    """What keeps a module out of every public format, as a clause; empty if Medusa's describes it.

    `int8` tells whether its matrices are to be stored so.
    """
    shape = card.shape
    if shape is None:
        raise ValueError(f"a draft of kind {card.kind!r} is a model of its own, not a module")
    if not isinstance(shape, HeadsShape):
        return shape.not_public
    config = read_target_config(target_directory, card)
    found = {
        "its target is an encoder-decoder model": config.is_encoder_decoder,
        "a layer adds the last token to the hidden state": shape.mix_rank > 0,
        "a selector ranks the candidates": shape.selector_rank > 0,
        "it reads another hidden state than the target's last one": card.taps != (decoder_layer_count(config),),
        "its matrices are int8": int8,
    }
    return next((clause for clause, is_so in found.items() if is_so), "")


def trained_card(card: DraftDescription, target_directory: Path) -> DraftCard:
    """The card of a module of a public format that can be trained further: heads as `pilotfish distill` stores them.

    Raises `ModelLoadError` for other ones, and for a target of other sizes.
    """
    shape = card.shape
    if not isinstance(shape, MedusaShape) or shape.blocks != 1 or shape.has_bias or shape.rows:
        raise ModelLoadError(
            f"draft of kind {card.kind!r} in a public format: only heads of one block without bias and with one common "
            "output head can be trained further as a module of Pilotfish's own format; an EAGLE-3 head needs --kind "
            "eagle3, and a DSpark drafter --kind dspark"
        )
    return DraftCard(
        card.target,
        card.target_vocabulary_size,
        card.hidden_size,
        (),
        card.vocabulary_size,
        card.kind,
        (decoder_layer_count(read_target_config(target_directory, card)),),
        HeadsShape(shape.depths, mix_rank=0, selector_rank=0),
        card.tree,
    )
