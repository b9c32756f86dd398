"""The draft tree of one sequence. It persists across rounds: a commit moves the root, and the nodes below it stay.

The root is the last committed token. The keys and values of expanded nodes are stored in branches. A branch is a block
table: the first expanded child continues its parent's table, and its siblings continue forks of that table. A commit
frees the branches that are not below the new root.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from cluster.core.drafting import ANY_TOKENS, NextTokens
from workers.draft.common.trees.calibration import Calibration
from workers.draft.common.trees.draft_node import ChosenTree, DraftNode
from workers.draft.common.trees.expander import BranchMemory, DraftedToken
from workers.draft.common.trees.node_probabilities import estimate_children, observe_decision
from workers.kv.block_table import BlockTable

LookUp = Callable[[Sequence[int]], tuple[int, int] | None]
"""Maps a path below the committed text to the token that followed it earlier, and the number of matching tokens."""
LEAST_PATH_PROBABILITY = 0.05
"""Paths less probable than this are not looked up."""


class DraftTree:
    """Nodes below the last committed token, and the block tables that store them."""

    def __init__(
        self,
        memory: BranchMemory,
        calibration: Calibration,
        is_greedy: bool,
        look_up: LookUp | None = None,
        max_lookup_depth: int = 0,
    ) -> None:
        self._memory = memory
        self.calibration = calibration
        """How often the target takes what is drafted for this sequence."""
        self._look_up = look_up
        self._max_lookup_depth = max_lookup_depth
        self.is_greedy = is_greedy
        """Whether the target decodes this sequence greedily; confidences are calibrated separately for that."""
        self.root_table = memory.new_table()
        """Table that begins with committed tokens: all of them once the root is expanded."""
        self.root = DraftNode(0, None, 0)
        self.nodes: list[DraftNode] = []
        """All nodes but the root, parents before their children."""
        self.expanded_since_proposal = 0
        """Number of nodes that were expanded since the last proposal."""
        self.next_tokens = ANY_TOKENS
        """What the sequence's grammar says of the first tokens below the root."""

    @property
    def holds_blocks(self) -> bool:
        """Whether any table of the tree holds a block."""
        return any(table.held for table in self.tables())

    def tables(self) -> set[BlockTable]:
        """All tables of the tree."""
        return {self.root_table, *(node.table for node in self.nodes if node.table is not None)}

    # --- commits --------------------------------------------------------------------------------

    def commit(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the committed text: the node at their end becomes the root; other nodes go."""
        node = self.root
        for token in tokens:
            child = node.child(token)
            observe_decision(node, child, self.calibration, self.is_greedy)
            if child is None:
                table = self._continuing_table(node)
                self._memory.truncate(table, min(table.stored_len, node.length))
                self._set_root(DraftNode(tokens[-1], None, self.root.length + len(tokens)), table)
                return
            node = child
        if node is not self.root:
            self._set_root(node, self._continuing_table(node))

    def restart(self, tokens: Sequence[int], is_greedy: bool) -> None:
        """Drop all nodes and begin with `tokens`; what the root's table stores of them, except the last, stays."""
        self.is_greedy = is_greedy
        stored = self.root_table.tokens
        limit = min(len(stored), len(tokens) - 1)
        common = next((position for position in range(limit) if stored[position] != tokens[position]), limit)
        self._memory.truncate(self.root_table, common)
        self._set_root(DraftNode(tokens[-1], None, len(tokens)), self.root_table)

    def evict(self) -> None:
        """Free all tables and drop all nodes."""
        for table in self.tables():
            self._memory.release(table)
        self.root_table = self._memory.new_table()
        self.root = DraftNode(self.root.token, None, self.root.length)
        self.nodes = []

    # --- grammars -------------------------------------------------------------------------------

    def restrict(self, known: NextTokens, call: int) -> None:
        """Drop the nodes that the sequence's grammar excludes, and draft the tokens that it allows alone.

        A root none of whose candidates may follow is expanded again. The next commit or restart ends the restriction.
        """
        self.next_tokens = known
        before, level = self.tables(), [self.root]
        for depth in range(len(known.forced) + 1):
            for node in level:
                node.children = [child for child in node.children if known.permits(depth, child.token)]
            for token in known.forced[depth : depth + 1]:
                for node in level:
                    forced = node.child(token) or self._add_child(node, token, call)
                    forced.probability = 1.0
            level = [child for node in level for child in node.children]
        self.nodes = list(self.root.descendants())
        if not self.nodes and self.root.table is not None:
            self.root.table = None
            self._memory.truncate(self.root_table, min(self.root_table.stored_len, self.root.length - 1))
        self.root.update_path_probabilities()
        for unused in before.difference(self.tables()):
            self._memory.release(unused)

    def _permits(self, node: DraftNode, token: int) -> bool:
        """Whether the grammar may allow a token below `node`."""
        return self.next_tokens.permits(node.length - self.root.length, token)

    # --- expansion ------------------------------------------------------------------------------

    def table_for(self, node: DraftNode, in_use: Container[BlockTable]) -> BlockTable:
        """The table to store the node's token in: its parent's if that ends there and is not `in_use`, else a fork.

        The caller passes it either to `expand` or to `discard`. Raises `RuntimeError` for a node whose parent is not
        expanded.
        """
        parent = node.parent
        if parent is None:
            return self.root_table
        table = parent.table
        if table is None:
            raise RuntimeError("a node is expanded before its parent")
        if table.stored_len == parent.length and table not in in_use:
            return table
        return self._memory.fork(table, parent.length)

    def discard(self, node: DraftNode, table: BlockTable) -> None:
        """Undo `table_for` for a node that is not expanded: free what the table has beyond its stored tokens."""
        if node.parent is None:
            # Candidates are drafted after the root's token, so it must go through the model again.
            self._memory.truncate(table, min(table.stored_len, node.length - 1))
        elif table is node.parent.table:
            self._memory.truncate(table, table.stored_len)
        else:
            self._memory.release(table)

    def expand(self, node: DraftNode, table: BlockTable, candidates: Sequence[DraftedToken], call: int) -> None:
        """Record that `table` stores the node's token and that the model drafted `candidates`, best first, after it."""
        node.table = table
        known = {child.token: child for child in node.children}
        for rank, (token, confidence) in enumerate(one for one in candidates if self._permits(node, one[0])):
            child = known.get(token) or self._add_child(node, token, call)
            child.rank, child.confidence = rank, confidence
        node.children.sort(key=lambda child: len(candidates) if child.rank is None else child.rank)
        self._estimate_children(node)
        if known:
            node.update_path_probabilities()
        for child in node.children:
            self._extend(child, call)
        self.expanded_since_proposal += 1

    def extend_by_lookup(self, call: int) -> None:
        """Add looked-up tokens below the root and below every leaf. This costs no forward pass."""
        if self._look_up is not None:
            for node in [self.root, *self.nodes]:
                if node is self.root or not node.children:
                    self._extend(node, call)

    # --- proposals ------------------------------------------------------------------------------

    def nodes_within(self, max_depth: int) -> list[DraftNode]:
        """Nodes at most `max_depth` below the root, most probable path first, parents before their children."""
        deepest = self.root.length + max_depth
        return sorted((node for node in self.nodes if node.length <= deepest), key=lambda node: -node.path_probability)

    def propose(self, nodes: Sequence[DraftNode]) -> ChosenTree:
        """Build the proposal of `nodes`, and mark them as proposed.

        Each node is followed by its most probable child, so that the most probable path is contiguous.
        """
        self._mark_proposed(nodes)
        return self.root.chosen_tree(frozenset(nodes))

    # --- internals ------------------------------------------------------------------------------

    def _mark_proposed(self, nodes: Sequence[DraftNode]) -> None:
        for node in self.nodes:
            node.is_proposed = False
        for node in nodes:
            node.is_proposed = True
        self.expanded_since_proposal = 0
        self.root.is_beyond_proposal = not nodes
        for node in self.nodes:
            is_leaf = node.is_proposed and not any(child.is_proposed for child in node.children)
            node.is_beyond_proposal = is_leaf or (node.parent is not None and node.parent.is_beyond_proposal)

    def _add_child(self, node: DraftNode, token: int, call: int) -> DraftNode:
        child = DraftNode(token, node, node.length + 1, call)
        node.children.append(child)
        self.nodes.append(child)
        return child

    def _estimate_children(self, node: DraftNode) -> None:
        """Set the probabilities of the children below a node. A token that is allowed alone is sure to be taken."""
        estimate_children(node, self.calibration, self.is_greedy)
        if node.length - self.root.length < len(self.next_tokens.forced):
            for child in node.children:  # the only one
                child.probability, child.path_probability = 1.0, node.path_probability

    def _extend(self, node: DraftNode, call: int) -> None:
        """Add a chain of looked-up tokens below `node`: each followed the path before it earlier in the text."""
        if self._look_up is None or not self._may_extend(node):
            return
        path = node.path_tokens()
        while self._may_extend(node):
            found = self._look_up(path)
            if found is None:
                return
            token, match_length = found
            if not self._permits(node, token):
                return
            had_children = bool(node.children)
            child = node.child(token) or self._add_child(node, token, call)
            child.match_length = match_length
            self._estimate_children(node)
            if had_children:
                node.update_path_probabilities()
            path.append(token)
            node = child

    def _may_extend(self, node: DraftNode) -> bool:
        depth = node.length - self.root.length
        return depth < self._max_lookup_depth and node.path_probability >= LEAST_PATH_PROBABILITY

    def _continuing_table(self, node: DraftNode) -> BlockTable:
        """The table that stores the path to `node`, or as much of it as is stored."""
        if node.table is not None:
            return node.table
        above = node.parent
        while above is not None and above.table is None:
            above = above.parent
        if above is None or above.table is None:
            return self.root_table
        # No sibling of an unexpanded node is needed any more, so the table may end before them.
        self._memory.truncate(above.table, min(above.table.stored_len, above.length))
        return above.table

    def _set_root(self, root: DraftNode, table: BlockTable) -> None:
        """Keep `table` and the nodes below `root`; free all other tables."""
        before = self.tables()
        self.next_tokens = ANY_TOKENS
        root.parent = None
        root.probability = root.path_probability = 1.0
        self.root, self.root_table = root, table
        self.nodes = list(root.descendants())
        root.update_path_probabilities()
        for unused in before.difference(self.tables()):
            self._memory.release(unused)
