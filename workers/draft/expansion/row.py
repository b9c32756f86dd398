"""One row of a call at work: how much of its budget is grown, and what would help most."""

from __future__ import annotations

from cluster.core.config import DraftSection
from cluster.core.drafting import DraftRow, Proposal
from workers.draft.expansion.calibration import KINDS, Calibration
from workers.draft.expansion.draft_tree import Node
from workers.draft.expansion.session import GrowingSession, Pick


class Work:
    """A row that is served. `picks` tells what to expand next, and what that is worth."""

    def __init__(
        self, session: GrowingSession, row: DraftRow, draft: DraftSection, width: int, max_context_len: int
    ) -> None:
        self.session = session
        self._row = row
        self._width = width
        self._max_context_len = max_context_len
        self._max_depth = min(row.budget.max_depth, draft.max_depth)
        self._max_nodes = min(row.budget.max_nodes, draft.max_nodes) if self._max_depth else 0
        session.is_asked = self._max_nodes > 0
        self._passes_left = self._max_depth
        self.is_short = False
        """Whether the tree is smaller than wanted: then it grows, whatever that gains."""
        self.gain = 0.0
        """Tokens that expanding `picks` is expected to add to the round."""

    def picks(self, calibration: Calibration) -> list[Pick]:
        """What to expand in the next pass."""
        self.is_short, self.gain = False, 0.0
        if not self._max_nodes or not self._passes_left:
            return []
        session, tree = self.session, self.session.tree
        nodes = tree.within(self._max_depth)
        self.is_short = len(nodes) < self._max_nodes
        least = 0.0 if self.is_short else nodes[self._max_nodes - 1].path
        # What is expanded is first guesses, almost always.
        hope = calibration.hope(KINDS[tree.is_greedy, True])
        if tree.root.branch is None:
            if tree.root.length > self._max_context_len:
                return []
            self.gain = max(0.0, tree.root.unclaimed() * hope - least)
            return [Pick(session, tree.root, tuple(session.pending()))]
        deepest = min(tree.root.length + self._max_depth - 1, self._max_context_len)
        found: list[Pick] = []
        for node in nodes:
            if len(found) == self._width or (node.path * hope <= least and not self.is_short):
                break
            if node.branch is None and node.length <= deepest and node.parent is not None and node.parent.branch:
                gain = node.unclaimed() * hope - least
                if gain > 0.0 or self.is_short:
                    self.gain += gain
                    found.append(Pick(session, node, (node.token,)))
        self.is_short = self.is_short and bool(found)
        return found

    def path_end(self) -> int:
        """Tokens that are stored once its first path is as deep as it may be; 0 if it does not begin with the root."""
        root = self.session.tree.root
        if root.branch is not None or not self._max_nodes or root.length > self._max_context_len:
            return 0
        return min(root.length + min(self._max_depth, self._max_nodes) - 1, self._max_context_len)

    def expanded(self) -> None:
        """A pass has gone through for this row."""
        self._passes_left -= 1

    def give_up(self) -> None:
        """There is no room: the row goes with what it has."""
        self._passes_left = 0

    def proposal(self, call: int) -> Proposal:
        """The best of what has been grown by the call of this number."""
        tree = self.session.tree
        nodes: list[Node] = tree.within(self._max_depth)[: self._max_nodes]
        guessed, probabilities = tree.send(nodes)
        ready = sum(node.born < call for node in nodes)
        return Proposal(self._row.sequence_id, self._row.base_len, guessed, None, probabilities, ready)
