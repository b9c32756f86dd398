"""Chooses the nodes to expand between calls: the most probable ones of all sequences first."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from workers.draft.common.trees.draft_node import DraftNode
from workers.draft.common.trees.expansion_settings import ExpansionSettings
from workers.draft.common.trees.tree_session import NodeExpansion, TreeSession

MOST_AHEAD = 4
"""Most nodes of one tree that are expanded between two calls, in units of the largest tree."""
LEAST_PATH_PROBABILITY = 0.02
"""Nodes with a lower path probability than this are not expanded between calls."""

_Entry = tuple[float, int, int, TreeSession, DraftNode]
"""Minus the path probability, a serial number that breaks ties, the session's version, the session and the node."""


class RunAheadQueue:
    """Priority queue of nodes that the mode allows to expand. An entry is void once its session's version changed."""

    def __init__(self, settings: ExpansionSettings, max_nodes: int, max_context_len: int) -> None:
        self._mode = settings.mode
        self._width = settings.width
        self._most_ahead = MOST_AHEAD * max_nodes
        self._max_context_len = max_context_len
        self._entries: list[_Entry] = []
        self._count = 0

    def renew(self, sessions: Sequence[TreeSession]) -> None:
        """Replace the entries of sessions for which a proposal was just made, and drop void ones."""
        for session in sessions:
            session.version += 1
        self._entries = [entry for entry in self._entries if entry[2] == entry[3].version]
        heapq.heapify(self._entries)
        for session in sessions:
            root = session.tree.root
            if root.table is None:
                if root.length <= self._max_context_len:
                    self._push(session, root)
            else:
                self._push_expandable(session, session.tree.nodes)

    def take(self, most_nodes: int, most_tokens: int) -> list[NodeExpansion]:
        """Remove and return the next pass: up to `most_nodes` nodes, or up to `most_tokens` unstored committed tokens.

        Committed tokens of one sequence make a pass of their own.
        """
        taken: list[NodeExpansion] = []
        width: Counter[int] = Counter()
        postponed: list[_Entry] = []
        while self._entries and len(taken) < most_nodes:
            entry = heapq.heappop(self._entries)
            _, _, version, session, node = entry
            if version != session.version or node.table is not None:
                continue
            if node.parent is None:
                unstored = session.catch_up_tokens(self._max_context_len)
                if unstored and not taken:
                    taken.append(NodeExpansion(session, node, unstored[:most_tokens], is_last=False))
                    break
                if unstored:
                    postponed.append(entry)
            elif session.tree.expanded_since_proposal < self._most_ahead:
                if width[id(session)] < self._width:
                    width[id(session)] += 1
                    taken.append(NodeExpansion(session, node, (node.token,)))
                else:
                    postponed.append(entry)
        for entry in postponed:
            heapq.heappush(self._entries, entry)
        return taken

    def add_below(self, expanded: Sequence[NodeExpansion]) -> None:
        """Add the children of nodes that were just expanded, or the rest of a sequence's committed tokens."""
        for expansion in expanded:
            if expansion.is_last:
                self._push_expandable(expansion.session, expansion.node.children)
            else:
                self._push(expansion.session, expansion.node)

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()

    def _push_expandable(self, session: TreeSession, nodes: Sequence[DraftNode]) -> None:
        if self._mode == "serial" or not session.wants_drafts:
            return
        ends = session.start.sampling.end_token_ids  # nothing after them is accepted
        for node in nodes:
            is_allowed = node.token not in ends and (self._mode == "enumerate" or node.is_beyond_proposal)
            if is_allowed and _is_expandable(node) and node.length <= self._max_context_len:
                self._push(session, node)

    def _push(self, session: TreeSession, node: DraftNode) -> None:
        self._count += 1
        heapq.heappush(self._entries, (-node.path_probability, self._count, session.version, session, node))


def _is_expandable(node: DraftNode) -> bool:
    """Whether the node is probable enough and not expanded, and its parent is expanded."""
    has_expanded_parent = node.parent is not None and node.parent.table is not None
    return has_expanded_parent and node.table is None and node.path_probability >= LEAST_PATH_PROBABILITY
