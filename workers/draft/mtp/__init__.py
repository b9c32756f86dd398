"""Multi-token prediction: a layer that was trained with the target drafts a tree, depth by depth (DeepSeek-AI 2024).

Its input is the target's last hidden state and the embedding of the next token. Beyond the committed text, its own
output takes the place of the hidden state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cluster.core.config.base import ModuleSection
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import EvidenceNeeds
from workers.draft.common.modules.module_settings import ContextSettings
from workers.draft.registry import ON_TARGET_FIRST, register
from workers.forward.graph_sizes import describe_head_graphs, ranked_tokens, widths_up_to
from workers.model.draft_card import LAST_TAP

if TYPE_CHECKING:
    from workers.draft.eagle.eagle_drafter import EagleTreeDrafter


class MtpSettings(ModuleSection, ContextSettings):
    """The layer, the form of the trees, and the type of the layer's weights."""

    draft_kind: ClassVar[str] = "mtp"
    reads_target_files: ClassVar[bool] = True
    path: str = ""
    """A layer for the target in the format of `speculators`: a local directory or hub id; unset: the layer in the
    target's own files."""
    revision: str | None = None
    """Hub revision of `path`; unset takes the default branch. It has no effect on local files."""
    weights: Literal["float32", "bfloat16"] = "bfloat16"
    """Type that the layer's weights are stored in."""
    candidates: Annotated[int, Field(ge=1, le=16)] = 4
    """Most candidates below one node."""
    width: Annotated[int, Field(ge=1, le=32)] = 4
    """Most nodes of one tree that one pass expands."""

    @property
    def graphs(self) -> str:
        return describe_head_graphs(self.width)

    def graph_logits(self, vocabulary_size: int) -> int:
        return ranked_tokens(widths_up_to(self.width)) * vocabulary_size


@register(
    "mtp",
    MtpSettings,
    needs=lambda _: EvidenceNeeds(taps=(LAST_TAP,)),
    places=ON_TARGET_FIRST,
    for_encoder_decoder=False,
)
def create_mtp(settings: MtpSettings, draft: DraftSection, target: TargetSection) -> EagleTreeDrafter:
    """Create the method `mtp`: load the layer.

    Raises `ModelLoadError` for a target without a layer of a known layout.
    """
    from workers.draft.mtp.mtp_pass import load_mtp_drafter

    return load_mtp_drafter(settings, draft, target)
