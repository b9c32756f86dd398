"""The allocation of a step: how many of its tokens, and of the free blocks, each row gets."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.scheduling.state import PlannedRow, SequenceView, State


def clip_draft(
    wanted: DraftBudget | None, max_draft: DraftBudget, max_draft_tokens: int | None, remaining: int
) -> DraftBudget:
    """Return the largest tree that one sequence can use. All bounds on a draft budget are applied here.

    `wanted` is the speculation controller's choice (`None` for no choice), `max_draft` the configuration's bound and
    `max_draft_tokens` the request's. `remaining` is the number of tokens that the answer may still get. The last of
    them is always the target's own, so a tree is less deep than `remaining`.
    """
    nodes, depth = max_draft.max_nodes, min(max_draft.max_depth, remaining - 1)
    if not nodes or (wanted is not None and not wanted.max_nodes):
        return NO_DRAFT
    if wanted is not None:
        nodes, depth = min(nodes, wanted.max_nodes), min(depth, wanted.max_depth)
    if max_draft_tokens is not None:
        nodes = min(nodes, max_draft_tokens)
    depth = min(depth, nodes)
    if depth <= 0:
        return NO_DRAFT
    if nodes == max_draft.max_nodes and depth == max_draft.max_depth:
        return max_draft
    return DraftBudget(nodes, depth)


class StepAllocation:
    """The tokens and blocks of one step while they are distributed over its rows."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.tokens = state.limits.max_step_tokens
        self.blocks = state.kv.blocks_free - sum(self._of_source(view) for view in state.running)
        self._prompt_tokens = self.tokens
        self._pending: dict[SequenceId, int] = {}
        self._drafts: dict[SequenceId, DraftBudget] = {}
        self._forced: dict[SequenceId, int] = {}

    def pending(self, view: SequenceView) -> int:
        """Committed tokens of the sequence that the step has so far."""
        return self._pending.get(view.id, 0)

    def held(self, view: SequenceView) -> int:
        """Blocks that preempting the sequence frees, those kept for its source included."""
        return self._state.layout.held(view.stored_len) + self._of_source(view)

    def send(self, view: SequenceView, pending: int) -> None:
        """Raise the sequence's committed tokens towards `pending`, as far as tokens and blocks allow."""
        before = self.pending(view)
        if more := self._take(view, pending - before):
            self._pending[view.id] = before + more

    def limit_prompts(self, most: int | None, prefilling: Sequence[SequenceView]) -> None:
        """Bound the prompt tokens of this step by `most`, including those that the step has already."""
        if most is not None:
            self._prompt_tokens = max(0, most - sum(self.pending(view) for view in prefilling))

    def prefill(self, view: SequenceView, pending: int) -> None:
        """Raise the sequence's committed tokens as `send` does, within the bound on prompt tokens."""
        before = self.pending(view)
        self.send(view, min(pending, before + self._prompt_tokens))
        self._prompt_tokens -= self.pending(view) - before

    def largest_draft(self, view: SequenceView) -> DraftBudget:
        """The largest tree that the sequence can use."""
        return clip_draft(view.draft, self._state.max_draft, view.max_draft_tokens, self._remaining(view))

    def forced(self, view: SequenceView) -> int:
        """The forced tokens that the sequence can use."""
        most = view.forced if view.max_draft_tokens is None else min(view.forced, view.max_draft_tokens)
        return max(0, min(most, self._remaining(view) - 1))

    def add_tree(self, view: SequenceView, largest: DraftBudget, nodes: int) -> None:
        """Give the sequence a tree of up to `nodes` nodes, as far as tokens and blocks allow."""
        nodes = self._take(view, nodes) if nodes > 0 else 0
        self._forced[view.id] = min(nodes, self.forced(view))
        if drafted := min(nodes, largest.max_nodes):
            self._drafts[view.id] = DraftBudget(drafted, min(drafted, largest.max_depth))

    def row(self, view: SequenceView) -> PlannedRow:
        """The sequence's part in the step."""
        pending = self.pending(view)
        draft, forced = self._drafts.get(view.id, NO_DRAFT), self._forced.get(view.id, 0)
        return PlannedRow(view.id, pending, pending == view.missing, draft, forced)

    def _of_source(self, view: SequenceView) -> int:
        """Blocks that the first row of the sequence takes for the source that the encoder reads then."""
        return self._state.layout.held(view.source_len) if view.source_len else 0

    def _remaining(self, view: SequenceView) -> int:
        """Tokens that the answer may still have in the request and in the context."""
        return min(view.remaining, self._state.max_context_len - view.length + 1)

    def _take(self, view: SequenceView, wanted: int) -> int:
        """Take up to `wanted` tokens and the blocks that they need. Returns the number taken."""
        layout = self._state.layout
        end = view.stored_len + self.pending(view)
        taken = max(0, min(wanted, self.tokens, layout.max_length(end, self.blocks) - end))
        self.tokens -= taken
        self.blocks -= layout.added(end, taken)
        return taken
