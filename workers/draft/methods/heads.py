"""Medusa (Cai et al. 2024): heads on the target's last hidden state predict all depths at once, and their best
candidates form a tree.

A low-rank layer adds the last token's embedding first, as in Hydra (Ankner et al. 2024), and a selector ranks the
candidates of each depth anew below each candidate of the depth before.
"""

from __future__ import annotations

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from workers.draft.parallel.build import create_heads_drafter
from workers.draft.parallel.drafter import HeadsDrafter
from workers.draft.parallel.settings import HeadsModuleSettings, TreeSettings, heads_needs
from workers.draft.registry import register


class HeadsSettings(HeadsModuleSettings, TreeSettings):
    """The heads, and the form of their trees."""


@register("heads", HeadsSettings, needs=heads_needs, placements=("target", "drafter"))
def create_heads(settings: HeadsSettings, draft: DraftSection, target: TargetSection) -> HeadsDrafter:
    """Create the method `heads`. Raises `ModelLoadError` and `ConfigurationError`."""
    return create_heads_drafter(settings, draft, target, *settings.form(draft))
