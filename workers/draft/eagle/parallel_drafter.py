"""Drafts with P-EAGLE: one pass of an EAGLE-3 head predicts several tokens at once.

After the committed text, the head reads a mask token beside a learned hidden state at each further position. Its output
there predicts the token of this depth from the committed text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from workers.draft.common.modules.context_store import ContextMemory, ContextStore
from workers.draft.common.modules.context_window import ContextShape
from workers.draft.common.modules.pass_of_salt import PassOfSalt
from workers.draft.common.modules.path_ranker import PathRanker
from workers.draft.common.modules.path_trees import PathDrafter, PathHistory, PathTrees, Wanted, decision_contexts
from workers.draft.common.modules.ranked_paths import TreeForm
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.modules.text_collector import TextCollector
from workers.draft.common.sessions import Sessions
from workers.draft.eagle.eagle_session import EagleSession
from workers.draft.eagle.feature_pass import FeaturePass
from workers.draft.eagle.head_context import HeadContext
from workers.draft.eagle.head_pass import committed_piece


class ParallelSession(EagleSession):
    """A sequence with the candidates that it was drafted last."""

    __slots__ = ("history",)

    def __init__(self, start: SequenceStart, shape: ContextShape, store: ContextStore, device: torch.device) -> None:
        super().__init__(start, shape, store, device)
        self.history = PathHistory()

    def forget_draft(self) -> None:
        """Drop the last draft, and the hidden states of tokens that were removed."""
        super().forget_draft()
        self.history.last = None


class ParallelTreeDrafter(PathDrafter[ParallelSession]):
    """Drafts trees of the candidates of all depths, one pass for all rows. It is a `DraftMethod`.

    A sequence whose hidden states at the last position but one are unknown gets no draft.
    """

    def __init__(
        self,
        head: FeaturePass,
        ranker: PathRanker,
        taps: TapReader,
        draft: DraftSection,
        memory: ContextMemory,
        form: TreeForm,
    ) -> None:
        """`ranker` ranks the head's outputs."""
        super().__init__(PathTrees(draft, head.depths, form))
        self._head = head
        self._ranker = ranker
        self._siblings = form.siblings
        shape, store = head.context_shape, memory.store
        self._sessions = Sessions(
            lambda start: ParallelSession(start, shape, store, head.device),
            vocabulary_size=head.vocabulary_size,
            most=memory.sequences,
        )
        self._context = HeadContext(PassOfSalt(head), TextCollector(taps), self._sessions)

    @torch.inference_mode()
    def _update(
        self, rows: Sequence[DraftRow], proposals: dict[SequenceId, Proposal]
    ) -> list[tuple[DraftRow, ParallelSession]]:
        return self._context.update(rows, proposals)

    def _is_ready(self, session: ParallelSession) -> bool:
        return session.output is not None and session.output[0] == session.anchor - 1

    @torch.inference_mode()
    def _draft(self, wanted: Sequence[Wanted[ParallelSession]], proposals: dict[SequenceId, Proposal]) -> None:
        depths = max(one.budget.max_depth for one in wanted)
        sessions = [one.session for one in wanted]
        outputs = torch.stack([one.output[1] for one in sessions if one.output is not None]).unsqueeze(1)
        if depths > 1:
            outputs = torch.cat([outputs, self._masked(sessions, depths - 1)], dim=1)
        self._build(wanted, self._ranker.rank(outputs, decision_contexts(sessions, depths), self._siblings), proposals)

    def _masked(self, sessions: Sequence[ParallelSession], count: int) -> Tensor:
        """Outputs [sessions, count, hidden size] of mask tokens at the next positions; each sees those before it."""
        token, feature = self._head.mask
        reach = self._head.context_shape.window
        pieces = [
            replace(committed_piece(one.window, one.anchor, (token,) * count, reach), wanted=range(count))
            for one in sessions
        ]
        features = feature.expand(len(sessions) * count, -1)
        return self._head.run(features, pieces).view(len(sessions), count, -1)
