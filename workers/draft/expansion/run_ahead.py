"""What may be expanded between calls, the likeliest of all sequences first."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from workers.draft.expansion.draft_tree import Node
from workers.draft.expansion.session import GrowingSession, Pick
from workers.draft.expansion.settings import ExpansionSettings

BEYOND = 4
"""Nodes of a tree that may be expanded before the next call, in units of the largest tree."""
FLOOR = 0.02
"""A node less likely than this is not expanded before it is asked for."""

_Entry = tuple[float, int, int, GrowingSession, Node]
"""Minus the chance, a number to tell equals apart, the session's version, and what it is about."""


class Frontier:
    """Nodes that the mode allows to expand ahead; an entry is void once its session has been told anything."""

    def __init__(self, settings: ExpansionSettings, max_nodes: int, max_context_len: int) -> None:
        self._mode = settings.mode
        self._width = settings.width
        self._most_ahead = BEYOND * max_nodes
        self._max_context_len = max_context_len
        self._entries: list[_Entry] = []
        self._count = 0

    def renew(self, sessions: Sequence[GrowingSession]) -> None:
        """These have just been served: what was planned for them before is void."""
        for session in sessions:
            session.version += 1
        self._entries = [entry for entry in self._entries if entry[2] == entry[3].version]
        heapq.heapify(self._entries)
        for session in sessions:
            root = session.tree.root
            if root.branch is None:
                if root.length <= self._max_context_len:
                    self._push(session, root)
            else:
                self._push_children(session, session.tree.nodes)

    def take(self, most_nodes: int, most_tokens: int) -> list[Pick]:
        """The next pass: at most so many nodes, and so many committed tokens of a sequence that must catch up."""
        picks: list[Pick] = []
        width: Counter[int] = Counter()
        put_off: list[_Entry] = []
        while self._entries and len(picks) < most_nodes:
            entry = heapq.heappop(self._entries)
            _, _, version, session, node = entry
            if version != session.version or node.branch is not None:
                continue
            if node.parent is None:
                told = session.behind(self._max_context_len)
                if told and not picks:
                    picks.append(Pick(session, node, told[:most_tokens], is_last=False))
                    break  # a chunk makes a pass long enough
                if told:
                    put_off.append(entry)
            elif session.tree.expanded_ahead < self._most_ahead:
                if width[id(session)] < self._width:
                    width[id(session)] += 1
                    picks.append(Pick(session, node, (node.token,)))
                else:
                    put_off.append(entry)
        for entry in put_off:
            heapq.heappush(self._entries, entry)
        return picks

    def add(self, picks: Sequence[Pick]) -> None:
        """These have been expanded: what hangs below them may be next."""
        for pick in picks:
            if pick.is_last:
                self._push_children(pick.session, pick.node.children)
            else:
                self._push(pick.session, pick.node)

    def clear(self) -> None:
        """Nothing is to be expanded."""
        self._entries.clear()

    def _push_children(self, session: GrowingSession, nodes: Sequence[Node]) -> None:
        if self._mode == "serial" or not session.is_asked:
            return
        for node in nodes:
            is_allowed = (self._mode == "enumerate" or node.is_ahead) and _is_next(node)
            if is_allowed and node.branch is None and node.path >= FLOOR and node.length <= self._max_context_len:
                self._push(session, node)

    def _push(self, session: GrowingSession, node: Node) -> None:
        self._count += 1
        heapq.heappush(self._entries, (-node.path, self._count, session.version, session, node))


def _is_next(node: Node) -> bool:
    """Whether its parent has been expanded: what was looked up hangs below nodes that have not."""
    return node.parent is not None and node.parent.branch is not None
