"""Chooses which nodes to expand for one row of a `propose` call, and builds the row's proposal."""

from __future__ import annotations

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftRow, Proposal
from workers.draft.common.trees.calibration import KINDS
from workers.draft.common.trees.tree_session import NodeExpansion, TreeSession


class ProposalBuilder:
    """Chooses the expansions that help one row most, within its budget."""

    def __init__(
        self, session: TreeSession, row: DraftRow, draft: DraftSection, width: int, max_context_len: int
    ) -> None:
        self.session = session
        self._row = row
        self._width = width
        self._max_context_len = max_context_len
        self._max_depth = min(row.budget.max_depth, draft.max_depth)
        self._max_nodes = min(row.budget.max_nodes, draft.max_nodes) if self._max_depth else 0
        session.wants_drafts = self._max_nodes > 0
        self._passes_left = self._max_depth
        self.is_short = False
        """Whether the tree is smaller than its budget; such a tree is expanded whatever the gain."""
        self.gain = 0.0
        """Expected number of tokens that the chosen expansions add to the round."""

    def choose(self) -> list[NodeExpansion]:
        """Choose the expansions of the next pass, and set `is_short` and `gain` for them."""
        self.is_short, self.gain = False, 0.0
        if not self._max_nodes or not self._passes_left:
            return []
        session, tree = self.session, self.session.tree
        nodes = tree.nodes_within(self._max_depth)
        self.is_short = len(nodes) < self._max_nodes
        # A new node replaces the least probable one of a full tree.
        replaced = 0.0 if self.is_short else nodes[self._max_nodes - 1].path_probability
        # Expanded nodes are almost always first candidates.
        first_rate = tree.calibration.first_rate(KINDS[tree.is_greedy, True])
        if tree.root.table is None:
            if tree.root.length > self._max_context_len:
                return []
            self.gain = max(0.0, tree.root.uncovered_probability() * first_rate - replaced)
            return [NodeExpansion(session, tree.root, tuple(session.unstored_tokens()))]
        deepest = min(tree.root.length + self._max_depth - 1, self._max_context_len)
        chosen: list[NodeExpansion] = []
        ends = session.start.sampling.end_token_ids
        for node in nodes:
            if len(chosen) == self._width or (node.path_probability * first_rate <= replaced and not self.is_short):
                break
            if node.token in ends:
                continue  # nothing after it is accepted
            if node.table is None and node.length <= deepest and node.parent is not None and node.parent.table:
                gain = node.uncovered_probability() * first_rate - replaced
                if gain > 0.0 or self.is_short:
                    self.gain += gain
                    chosen.append(NodeExpansion(session, node, (node.token,)))
        self.is_short = self.is_short and bool(chosen)
        return chosen

    def first_path_len(self) -> int:
        """Number of tokens stored once the first path has its full depth; 0 where the root is already expanded."""
        root = self.session.tree.root
        if root.table is not None or not self._max_nodes or root.length > self._max_context_len:
            return 0
        return min(root.length + min(self._max_depth, self._max_nodes) - 1, self._max_context_len)

    def count_pass(self) -> None:
        """Count one pass that was made for this row."""
        self._passes_left -= 1

    def stop(self) -> None:
        """Make no further pass for this row, because the memory has no room."""
        self._passes_left = 0

    def build(self, call: int) -> Proposal:
        """Build the proposal from the most probable nodes. `call` is the number of this call."""
        tree = self.session.tree
        nodes = tree.nodes_within(self._max_depth)[: self._max_nodes]
        drafted, probabilities, origins = tree.propose(nodes)
        ready = sum(node.created_in_call < call for node in nodes)
        row = self._row
        return Proposal(row.sequence_id, row.base_len, drafted, None, probabilities, ready, origins=origins)
