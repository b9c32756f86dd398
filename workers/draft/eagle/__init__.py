"""An EAGLE-3-like head (Li et al. 2025): a small decoder on the target's hidden states drafts a tree, depth by depth.

Each pass expands the most probable nodes of all sequences (as in EAGLE-2, Li et al. 2024). Keys and values of drafted
tokens are made from the head's own outputs; once tokens are committed, the target's hidden states replace them.
P-EAGLE heads predict all depths in one pass instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from workers.draft.common.modules.module_settings import ContextModuleSettings, needs_of_module
from workers.draft.registry import ON_TARGET_FIRST, register
from workers.forward.graph_sizes import describe_head_graphs, ranked_tokens, widths_up_to
from workers.model.formats.registry import read_draft
from workers.model.public_shapes import FeatureShape

if TYPE_CHECKING:
    from workers.draft.eagle.eagle_drafter import EagleTreeDrafter
    from workers.draft.eagle.parallel_drafter import ParallelTreeDrafter


class EagleSettings(ContextModuleSettings):
    """The EAGLE head, and the form of its trees."""

    draft_kind: ClassVar[str] = "eagle"
    learns: ClassVar[bool] = True
    candidates: Annotated[int, Field(ge=1, le=16)] = 4
    """Most candidates below one node."""
    width: Annotated[int, Field(ge=1, le=32)] = 4
    """Most nodes of one tree that one pass expands."""

    @property
    def graphs(self) -> str:
        return describe_head_graphs(self.width)

    def graph_logits(self, vocabulary_size: int) -> int:
        card = read_draft(Path(self.path), self.taps)
        if isinstance(card.shape, FeatureShape) and card.shape.depths:
            return 0  # P-EAGLE ranks outside of graphs
        return ranked_tokens(widths_up_to(self.width)) * (card.vocabulary_size or vocabulary_size)


@register(
    "eagle",
    EagleSettings,
    needs=needs_of_module,
    places=ON_TARGET_FIRST,
    for_encoder_decoder=False,
)
def create_eagle(
    settings: EagleSettings, draft: DraftSection, target: TargetSection
) -> EagleTreeDrafter | ParallelTreeDrafter:
    """Create the method `eagle`: load the module.

    Raises `ModelLoadError`, and `ConfigurationError` if the target does not take its taps.
    """
    from workers.draft.eagle.eagle_drafter import load_eagle_drafter
    from workers.draft.eagle.eagle_growth import GrowthLimits

    return load_eagle_drafter(settings, draft, target, GrowthLimits(settings.candidates, settings.width))
