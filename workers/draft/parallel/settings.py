"""Settings and evidence of the methods with heads that predict all depths at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cluster.core.config.draft_section import DraftModuleSection
from cluster.core.drafting import EvidenceNeeds
from workers.model.draft_card import read_card

Weights = Literal["auto", "float32", "bfloat16", "int8"]
"""The types that a module's weights can be stored in."""


class HeadsModuleSettings(DraftModuleSection):
    """Heads that were trained for the target."""

    weights: Weights = "auto"
    """Type that the heads' weights are stored in. `auto` is int8 on a CPU with tile registers (AMX), else bfloat16. A
    GPU stores int8 as bfloat16, too."""


def heads_needs(settings: DraftModuleSection) -> EvidenceNeeds:
    """The taps that the heads read: those of the settings, else those of the module's card."""
    return EvidenceNeeds(taps=settings.taps or read_card(Path(settings.path)).taps)
