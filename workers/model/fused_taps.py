"""Tells whether a draft first fuses the taps of a position to one feature, and its width. Needs no torch."""

from __future__ import annotations

from workers.model.draft_card import DraftDescription
from workers.model.draft_shapes import EagleShape
from workers.model.public_shapes import FeatureShape, MaskedBlockShape


def fused_width(card: DraftDescription) -> int | None:
    """Values of the feature that the draft makes of several taps of a position; `None` if it makes none.

    A block drafter of `pilotfish distill` makes keys and values of the taps themselves.
    """
    if len(card.taps) < 2:
        return None
    match card.shape:
        case EagleShape(layer=layer):
            return layer.hidden_size
        case FeatureShape(body=body) | MaskedBlockShape(body=body):
            return body.hidden_size
    return None
