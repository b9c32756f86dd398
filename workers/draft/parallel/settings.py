"""What the methods with heads that predict all depths at once share: settings, evidence, and the drafter's creation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cluster.core.config.sections import DraftModuleSection, DraftSection, TargetSection
from cluster.core.drafting import EvidenceNeeds
from workers.draft.hidden_states import TapReader
from workers.draft.parallel.drafter import HeadsDrafter
from workers.draft.parallel.paths import Shape
from workers.model.draft_card import read_card

Weights = Literal["auto", "float32", "bfloat16", "int8"]
"""The types that a module's weights can be stored in."""


class HeadsModuleSettings(DraftModuleSection):
    """Heads that were trained for the target."""

    weights: Weights = "auto"
    """Type that the heads' weights are stored in; `auto` is bfloat16, and a GPU stores int8 as bfloat16, too."""


def heads_needs(settings: DraftModuleSection) -> EvidenceNeeds:
    """The taps that the heads read."""
    return EvidenceNeeds(taps=_taps(settings))


def create_heads_drafter(
    settings: HeadsModuleSettings,
    draft: DraftSection,
    target: TargetSection,
    siblings: int,
    shape: Shape | None = None,
) -> HeadsDrafter:
    """Load the heads and make their drafter; see `HeadsDrafter`.

    Raises `ModelLoadError`, and `ConfigurationError` if the target does not take the taps.
    """
    from workers.draft.parallel.heads import ParallelHeads

    heads = ParallelHeads(Path(settings.path), target, settings.weights)
    heads.warm_up(siblings)
    reader = TapReader(_taps(settings), target, heads.hidden_size)
    return HeadsDrafter(heads, reader, draft, siblings, shape)


def _taps(settings: DraftModuleSection) -> tuple[int, ...]:
    return settings.taps or read_card(Path(settings.path)).taps
