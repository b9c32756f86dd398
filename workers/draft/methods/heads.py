"""Medusa (Cai et al. 2024): heads on the target's last hidden state predict all depths at once, and their best
candidates form a tree.

A low-rank layer adds the last token's embedding first, as in Hydra (Ankner et al. 2024), and a selector ranks the
candidates of each depth anew below each candidate of the depth before.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from workers.draft.parallel.build import create_heads_drafter
from workers.draft.parallel.drafter import HeadsDrafter
from workers.draft.parallel.settings import HeadsModuleSettings, heads_needs
from workers.draft.registry import register

_MOST_CANDIDATES = 16

TreePath = Annotated[tuple[Annotated[int, Field(ge=0, lt=_MOST_CANDIDATES)], ...], Field(min_length=1, max_length=64)]


class HeadsSettings(HeadsModuleSettings):
    """The heads, and the form of their trees."""

    candidates: Annotated[int, Field(ge=1, le=_MOST_CANDIDATES)] = 8
    """Most candidates below one node, if `tree` is `auto`."""
    tree: Literal["auto"] | Annotated[tuple[TreePath, ...], Field(min_length=1, max_length=256)] = "auto"
    """Nodes that a tree may have, each as the ranks along its path: `[[0], [1], [0, 0]]` is the best and the second
    candidate, and the best one after the best. `auto` drafts the nodes of the highest estimated probability."""

    @field_validator("tree")
    @classmethod
    def _check(cls, tree: Literal["auto"] | tuple[TreePath, ...]) -> Literal["auto"] | tuple[TreePath, ...]:
        for path in () if tree == "auto" else tree:
            if len(path) > 1 and path[:-1] not in tree:
                raise ValueError(f"tree: {list(path)} needs its parent {list(path[:-1])}")
        return tree


@register("heads", HeadsSettings, needs=heads_needs, placements=("target", "drafter"))
def create_heads(settings: HeadsSettings, draft: DraftSection, target: TargetSection) -> HeadsDrafter:
    """Create the method `heads`. Raises `ModelLoadError` and `ConfigurationError`."""
    if settings.tree == "auto":
        return create_heads_drafter(settings, draft, target, settings.candidates)
    siblings = 1 + max(rank for path in settings.tree for rank in path)
    return create_heads_drafter(settings, draft, target, siblings, frozenset(settings.tree))
