"""Plain decoding: every proposal is an empty tree. The method stores nothing, so nothing is ever out of sync."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.config.base import PluginSettings
from cluster.core.config.draft_section import NO_DRAFTS, DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId
from workers.draft.registry import register


class NoDrafter:
    """Answers every row with the empty tree."""

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        return tuple(Proposal(row.sequence_id, row.base_len) for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Do nothing, because nothing is stored."""


@register(NO_DRAFTS, PluginSettings)
def create_none(settings: PluginSettings, draft: DraftSection, target: TargetSection) -> NoDrafter:  # noqa: ARG001
    """Create the method `none`; it has no settings."""
    return NoDrafter()
