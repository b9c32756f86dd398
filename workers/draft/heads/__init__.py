"""Medusa (Cai et al. 2024): heads on the target's last hidden state predict all depths at once.

`heads` drafts the tree of their best candidates. A low-rank layer adds the last token's embedding first, as in Hydra
(Ankner et al. 2024), and a selector ranks the candidates of each depth anew below each candidate of the depth before.
`blockwise` drafts one chain of their best tokens (blockwise parallel decoding, Stern et al. 2018). The approximate
criteria of that paper are the acceptance rule `blockwise`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from workers.draft.common.modules.module_settings import ModuleSettings, TreeSettings, needs_of_module
from workers.draft.common.modules.ranked_paths import TreeForm
from workers.draft.registry import ON_TARGET_FIRST, register
from workers.forward.graph_sizes import describe_parallel_graphs, ranked_tokens
from workers.model.draft_shapes import HeadsShape
from workers.model.formats.registry import read_draft
from workers.model.public_shapes import MedusaShape

if TYPE_CHECKING:
    from workers.draft.heads.heads_drafter import HeadsDrafter


class HeadsSettings(ModuleSettings, TreeSettings):
    """The heads, and the form of their trees."""

    draft_kind: ClassVar[str] = "heads"
    learns: ClassVar[bool] = True

    @property
    def graphs(self) -> str:
        return describe_parallel_graphs()

    def graph_logits(self, vocabulary_size: int) -> int:
        return _graph_logits(self, vocabulary_size)


class BlockwiseSettings(ModuleSettings):
    """The heads; the length of a chain is `draft.max_depth`, at most one token for each head."""

    draft_kind: ClassVar[str] = "heads"
    learns: ClassVar[bool] = True

    @property
    def graphs(self) -> str:
        return describe_parallel_graphs()

    def graph_logits(self, vocabulary_size: int) -> int:
        return _graph_logits(self, vocabulary_size)


def _graph_logits(settings: ModuleSettings, vocabulary_size: int) -> int:
    """The logits in the largest graph. Hydra heads read each other's tokens, and have no graphs."""
    card = read_draft(Path(settings.path), settings.taps)
    if not isinstance(card.shape, (HeadsShape, MedusaShape)):
        return 0
    return ranked_tokens((card.shape.depths,)) * (card.vocabulary_size or vocabulary_size)


@register("heads", HeadsSettings, needs=needs_of_module, places=ON_TARGET_FIRST)
def create_heads(settings: HeadsSettings, draft: DraftSection, target: TargetSection) -> HeadsDrafter:
    """Create the method `heads`. Raises `ModelLoadError`, and `ConfigurationError` if the target lacks its taps."""
    from workers.draft.heads.heads_drafter import load_heads_drafter

    return load_heads_drafter(settings, draft, target, settings.form(draft))


@register("blockwise", BlockwiseSettings, needs=needs_of_module, places=ON_TARGET_FIRST)
def create_blockwise(settings: BlockwiseSettings, draft: DraftSection, target: TargetSection) -> HeadsDrafter:
    """Create the method `blockwise`. Raises `ModelLoadError`, and `ConfigurationError` if the target lacks its taps."""
    from workers.draft.heads.heads_drafter import load_heads_drafter

    return load_heads_drafter(settings, draft, target, TreeForm(siblings=1))
