"""Blockwise parallel decoding (Stern et al. 2018): the heads' best tokens form one chain.

One pass of the target verifies a block and gives the hidden state that the next block is predicted from. The paper's
approximate criteria are the acceptance rule `blockwise`.
"""

from __future__ import annotations

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from workers.draft.parallel.build import create_heads_drafter
from workers.draft.parallel.drafter import HeadsDrafter
from workers.draft.parallel.settings import HeadsModuleSettings, heads_needs
from workers.draft.registry import register


class BlockwiseSettings(HeadsModuleSettings):
    """The heads; the length of a block is `draft.max_depth`, at most one token for each head."""


@register("blockwise", BlockwiseSettings, needs=heads_needs, placements=("target", "drafter"))
def create_blockwise(settings: BlockwiseSettings, draft: DraftSection, target: TargetSection) -> HeadsDrafter:
    """Create the method `blockwise`. Raises `ModelLoadError` and `ConfigurationError`."""
    return create_heads_drafter(settings, draft, target, siblings=1)
