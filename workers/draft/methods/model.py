"""An independent draft model: a small language model that drafts with the target's sampling noise.

It ranks tokens as the target would, with the sequence's parameters, seed and position. Where the two distributions are
similar, the drafted tokens mostly equal the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cluster.core.config.base import Choice
from cluster.core.config.sections import DraftModelSection, DraftSection, TargetSection
from workers.draft.expansion.drafter import TreeDrafter
from workers.draft.expansion.settings import ExpansionSettings
from workers.draft.registry import register


class DraftModelSettings(DraftModelSection, ExpansionSettings):
    """The draft model, and how its trees are expanded."""

    renamed: ClassVar[dict[str, str]] = {name: name for name in ("mode", "width", "candidates", "lookup", "kv")}

    candidates: Annotated[int, Field(ge=1, le=16)] = 3
    """Drafted tokens below each expanded node."""
    lookup: Choice[Literal["off", "on"]] = "on"
    """`on` adds tokens that followed the same tokens earlier in the sequence. They need no forward pass."""


@register("model", DraftModelSettings)
def create_model(settings: DraftModelSettings, draft: DraftSection, target: TargetSection) -> TreeDrafter:
    """Create the method `model`: load the weights and warm up.

    Raises `ConfigurationError` when the draft's vocabulary is not the target's, and `ModelLoadError`.
    """
    from workers.draft.expansion.model_expander import ModelExpander, check_vocabularies
    from workers.kv.pool import KvPool
    from workers.model.loading import load_model

    model = load_model(settings, target_directory=Path(target.path))
    check_vocabularies(model, Path(settings.path), target)
    expander = ModelExpander(model, KvPool(model.kv_spec, settings.kv, truncatable=True), settings.candidates)
    expander.warm_up()
    return TreeDrafter(expander, settings, draft, has_lookup=settings.lookup == "on")
