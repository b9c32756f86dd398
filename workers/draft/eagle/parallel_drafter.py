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
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from workers.draft.common.modules.context_store import ContextMemory, ContextStore
from workers.draft.common.modules.context_window import ContextShape
from workers.draft.common.modules.path_ranker import PathRanker
from workers.draft.common.modules.path_trees import PathHistory, PathTrees, decision_contexts
from workers.draft.common.modules.ranked_paths import TreeForm
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.sessions import Sessions
from workers.draft.eagle.eagle_pass import committed_piece
from workers.draft.eagle.eagle_session import EagleSession
from workers.draft.eagle.feature_pass import FeaturePass
from workers.draft.eagle.head_context import HeadContext


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


class ParallelTreeDrafter:
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
        self._head = head
        self._ranker = ranker
        self._siblings = form.siblings
        self._trees = PathTrees(draft, head.depths, form)
        shape, store = head.context_shape, memory.store
        sessions = Sessions(
            lambda start: ParallelSession(start, shape, store, head.device),
            vocabulary_size=head.vocabulary_size,
            most=memory.sequences,
        )
        self._context = HeadContext(head, taps, sessions)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """Propose a tree for each row, in order."""
        proposals = {row.sequence_id: Proposal(row.sequence_id, row.base_len) for row in rows}
        wanted: list[tuple[DraftRow, DraftBudget, ParallelSession, Tensor]] = []
        for row, session in self._context.update(rows, proposals):
            self._trees.observe(session, session.history)
            budget = self._trees.within(row.budget)
            repeated = self._trees.repeated(session, session.history, budget)
            if repeated is not None:
                proposals[row.sequence_id] = repeated
            elif budget.max_depth and session.output is not None and session.output[0] == session.anchor - 1:
                wanted.append((row, budget, session, session.output[1]))
        if wanted:
            self._draft(wanted, proposals)
        return tuple(proposals[row.sequence_id] for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop what is stored for these sequences. Unknown ones are no error."""
        self._context.release(sequence_ids)

    def _draft(
        self,
        wanted: Sequence[tuple[DraftRow, DraftBudget, ParallelSession, Tensor]],
        proposals: dict[SequenceId, Proposal],
    ) -> None:
        """Rank all rows' candidates to the same depth and build a tree for each."""
        depths = max(budget.max_depth for _, budget, _, _ in wanted)
        sessions = [session for _, _, session, _ in wanted]
        outputs = torch.stack([output for _, _, _, output in wanted]).unsqueeze(1)
        if depths > 1:
            outputs = torch.cat([outputs, self._masked(sessions, depths - 1)], dim=1)
        ranked = self._ranker.rank(outputs, decision_contexts(sessions, depths), self._siblings)
        for (row, budget, session, _), paths in zip(wanted, ranked, strict=True):
            proposals[row.sequence_id] = self._trees.propose(row, budget, session, session.history, paths)

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
