"""The format of `pilotfish distill`: `config.json` with a draft card, and a safetensors file with the own tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from cluster.core.drafting import Tap
from workers.model.draft_card import VOCABULARY, WEIGHTS, DraftDescription, is_distilled, read_card
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.registry import DraftWeights, register

if TYPE_CHECKING:
    from torch import Tensor

SCALE = ".scale"
"""Ends the name of the scales of an int8 matrix, one for each row."""


class PilotfishFormat:
    """Directories with a draft card."""

    name = "pilotfish"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether there is a draft card."""
        return is_distilled(checkpoint.directory)

    def kind(self, checkpoint: Checkpoint) -> str:
        """The kind that the card names."""
        return read_card(checkpoint.directory).kind

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        """Read the card; see `DraftFormat.card`. The tensors are checked when they are read."""
        found = read_card(checkpoint.directory)
        values = {field.name: getattr(found, field.name) for field in fields(found)}
        return DraftDescription(**values | {"taps": tuple(taps)}) if taps else found

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        from workers.model.distilled import draft_vocabulary
        from workers.model.target_ends import read_tensors

        tensors = read_tensors(checkpoint.directory / WEIGHTS)
        vocabulary = draft_vocabulary(checkpoint.directory, tensors.get(VOCABULARY), card)
        return DraftWeights(restored(tensors), vocabulary)


def restored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with int8 matrices multiplied by their scales."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith(SCALE) or name == VOCABULARY:
            continue
        scale = tensors.get(name + SCALE)
        found[name] = value if scale is None else value.float() * scale.unsqueeze(-1)
    return found


register(PilotfishFormat())
