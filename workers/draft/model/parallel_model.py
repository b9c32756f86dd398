"""Drafts with PARD (An et al. 2025): one pass of a language model over mask tokens predicts several tokens at once.

The model is an ordinary one that was trained further. After the committed tokens it reads a mask token at each further
position; its output there predicts the token of this depth from the committed text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from workers.draft.common.modules.path_ranker import rank_by_logits
from workers.draft.common.modules.path_trees import PathDrafter, PathHistory, PathTrees, Wanted, decision_contexts
from workers.draft.common.modules.ranked_paths import TreeForm
from workers.draft.common.modules.shortlist import Shortlist
from workers.draft.common.sessions import Sessions, has_room
from workers.draft.model.drawing_drafter import MOST_FORWARD_TOKENS, DrawingSession
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.block_table import BlockTable
from workers.kv.pool import KvPool
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.eagle3_layout import PARALLEL_KEYS


def mask_token_of(directory: Path) -> int | None:
    """The mask token of a PARD model; `None` for other models. Raises `ModelLoadError` for one out of bounds."""
    config = Checkpoint.read(directory)
    key = next((one for one in PARALLEL_KEYS if config.config.get(one) is not None), None)
    return None if key is None else config.token(key, config.count("vocab_size"))


class ParallelSession(DrawingSession):
    """Committed tokens, the table of their keys and values, and the candidates that were drafted last."""

    __slots__ = ("history",)

    def __init__(self, start: SequenceStart, table: BlockTable) -> None:
        super().__init__(start, table)
        self.history = PathHistory()

    def forget_draft(self) -> None:
        """Drop the last draft."""
        self.history.last = None


class ParallelModelDrafter(PathDrafter[ParallelSession]):
    """Drafts trees of the candidates of all depths, one pass for all rows. It is a `DraftMethod`."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KvPool,
        mask_token: int,
        draft: DraftSection,
        siblings: int,
        shortlist: Shortlist,
    ) -> None:
        """`pool` must be truncatable; `siblings` is the largest number of candidates below one node."""
        super().__init__(PathTrees(draft, max(1, draft.max_depth), TreeForm(siblings)))
        self._pool = pool
        self._runner = ModelRunner(model, pool)
        self._most_context = model.max_context_len
        self._mask = mask_token
        self._siblings = siblings
        self._shortlist = shortlist
        self._sessions = Sessions(
            lambda start: ParallelSession(start, pool.new_table()),
            lambda session: pool.release(session.table),
            model.vocabulary_size,
        )
        self._runner.warm_up()

    def _update(
        self, rows: Sequence[DraftRow], proposals: dict[SequenceId, Proposal]
    ) -> Iterator[tuple[DraftRow, ParallelSession]]:
        return self._sessions.update(rows, proposals, lambda session, _: session.keep_common(self._pool))

    def _budget(self, row: DraftRow, session: ParallelSession) -> DraftBudget:
        return self._trees.within(row.budget).within(row.budget.max_nodes, self._room(session))

    def _room(self, session: ParallelSession) -> int:
        """The depths that the model's context length allows."""
        return max(0, self._most_context - len(session.tokens) + 1)

    def _draft(self, wanted: Sequence[Wanted[ParallelSession]], proposals: dict[SequenceId, Proposal]) -> None:
        """Rank the candidates of all rows for which there is memory, to the same depth if the context allows it."""
        in_use = [one.row.sequence_id for one in wanted]
        evictable = (one for one in self._sessions.least_recent(without=in_use) if one.table.stored_len)
        deepest = max(one.budget.max_depth for one in wanted)
        groups: dict[int, list[Wanted[ParallelSession]]] = {}
        for one in wanted:
            groups.setdefault(min(deepest, self._room(one.session)), []).append(one)
        for depths, rows in groups.items():
            ready = [one for one in rows if self._has_room(one.session, depths, evictable)]
            if ready:
                sessions = [one.session for one in ready]
                logits, contexts = self._logits(sessions, depths), decision_contexts(sessions, depths)
                ranked = rank_by_logits(self._shortlist, logits, depths, contexts, self._siblings)
                self._build(ready, ranked, proposals)

    def _has_room(self, session: ParallelSession, depths: int, evictable: Iterator[ParallelSession]) -> bool:
        """Make room for the session's tokens and the mask tokens, evicting others if need be."""
        return has_room(
            lambda: self._reserve(session, depths), evictable, lambda one: self._pool.truncate(one.table, 0)
        )

    def _reserve(self, session: ParallelSession, depths: int) -> None:
        self._pool.reserve(session.table, len(session.tokens) + depths - 1)

    def _logits(self, sessions: Sequence[ParallelSession], depths: int) -> Tensor:
        """Logits [sessions x depths, vocabulary] after the committed tokens and after the mask tokens behind them.

        Mask tokens leave nothing in the tables. Long prompts take several passes.
        """
        for session in sessions:
            while len(tokens := session.unstored()) > MOST_FORWARD_TOKENS:
                self._pass([ForwardRow(session.table, tokens[:MOST_FORWARD_TOKENS], select=())])
                self._reserve(session, depths)  # what a pass has not filled is free after it
        rows = []
        for session in sessions:
            tokens = session.unstored()
            masks = (self._mask,) * (depths - 1)
            rows.append(
                ForwardRow(
                    session.table, tokens + masks, select=tuple(range(len(tokens) - 1, len(tokens) + depths - 1))
                )
            )
        logits = self._pass(rows).float()
        for session in sessions:
            self._pool.truncate(session.table, len(session.tokens))
        return logits

    def _pass(self, rows: Sequence[ForwardRow]) -> Tensor:
        """Run a pass and store its tokens."""
        logits = self._runner.forward(rows)
        for row in rows:
            self._runner.commit(row)
        return logits
