"""Creates a drafter with heads that predict all depths at once, from its settings."""

from __future__ import annotations

from pathlib import Path

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from workers.draft.hidden_states import TapReader
from workers.draft.parallel.drafter import HeadsDrafter
from workers.draft.parallel.paths import Shape
from workers.draft.parallel.settings import HeadsModuleSettings, heads_needs


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
    reader = TapReader(heads_needs(settings).taps, target, heads.hidden_size)
    return HeadsDrafter(heads, reader, draft, siblings, shape)
