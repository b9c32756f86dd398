"""A block drafter: one pass of a small module predicts several tokens at once (DFlash, Chen et al. 2026; DSpark).

Its keys and values come from the target's hidden states, so it needs no pass over the text. A selector ranks the
candidates of each depth anew below each candidate of the depth before, and the most probable paths form a tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from workers.draft.common.modules.module_settings import ContextModuleSettings, TreeSettings, needs_of_module
from workers.draft.registry import ON_TARGET_FIRST, register
from workers.forward.graph_sizes import describe_block_graphs

if TYPE_CHECKING:
    from workers.draft.block.block_drafter import BlockTreeDrafter


class BlockSettings(ContextModuleSettings, TreeSettings):
    """The block drafter, and the form of its trees."""

    draft_kind: ClassVar[str] = "block"
    learns: ClassVar[bool] = True

    @property
    def graphs(self) -> str:
        return describe_block_graphs()


@register(
    "block",
    BlockSettings,
    needs=needs_of_module,
    places=ON_TARGET_FIRST,
    for_encoder_decoder=False,
)
def create_block(settings: BlockSettings, draft: DraftSection, target: TargetSection) -> BlockTreeDrafter:
    """Create the method `block`: load the module.

    Raises `ModelLoadError`, and `ConfigurationError` if the target does not take its taps.
    """
    from workers.draft.block.block_drafter import load_block_drafter

    return load_block_drafter(settings, draft, target, settings.form(draft))
