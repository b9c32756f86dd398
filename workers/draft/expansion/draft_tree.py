"""The growing tree of one sequence: what it may go on with, how likely that is, and which of it is stored.

Its root is the last committed token. A node is *expanded* once its token has gone through the model: its keys and
values are stored in a branch, and its children are guessed. A branch is a block table that begins with all that was
stored of the parent's: the first child goes on in the parent's own table, its siblings in forks of it. A commit makes
a node the root: what hangs below it stays as it is, the rest is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Protocol

from cluster.core.tree import ROOT, TokenTree
from workers.draft.expansion.calibration import KINDS, Calibration, Kind
from workers.draft.expansion.lookup_acceptance import Agreement
from workers.kv.block_table import BlockTable

Guess = tuple[int, float]
"""A token, and how sure the model is of it."""
LookUp = Callable[[Sequence[int]], tuple[int, int] | None]
"""What followed the committed text and a path below it when they came before, and how many tokens match."""
LEAST_PATH = 0.05
"""A text less likely than this is not looked up."""


class Memory(Protocol):
    """Where branches are stored: `KvPool`, or the `BlockAllocator` alone."""

    @property
    def blocks_total(self) -> int:
        """Blocks there are."""
        ...

    @property
    def blocks_free(self) -> int:
        """Blocks that no table holds."""
        ...

    def new_table(self) -> BlockTable:
        """An empty one."""
        ...

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """A table of its own that begins with the first `length` stored tokens; takes no block yet."""
        ...

    def reserve(self, table: BlockTable, length: int) -> object:
        """Make room for `length` tokens. Raises `KvPoolExhausted`, having changed nothing."""
        ...

    def truncate(self, table: BlockTable, length: int) -> None:
        """Free what lies beyond `length` tokens."""
        ...

    def release(self, table: BlockTable) -> None:
        """Free everything the table holds."""
        ...


class Node:
    """A guessed token in its place."""

    __slots__ = (
        "born",
        "branch",
        "chance",
        "children",
        "confidence",
        "is_ahead",
        "is_sent",
        "length",
        "match",
        "parent",
        "path",
        "rank",
        "token",
    )

    def __init__(
        self, token: int, parent: Node | None, length: int, confidence: float = 1.0, chance: float = 1.0, born: int = 0
    ) -> None:
        self.token = token
        self.parent = parent
        self.length = length
        """Tokens up to this one, itself included."""
        self.confidence = confidence
        """The model's own."""
        self.chance = chance
        """That this token follows, where its parent's does."""
        self.path: float = chance if parent is None else parent.path * chance
        """The chance that the committed text passes through here."""
        self.rank: int | None = None
        """Its place among the model's guesses after its parent; `None` if it is none of them."""
        self.match = 0
        """Tokens before it that had come before, where it was looked up what followed them."""
        self.born = born
        """The call during or after which it was grown."""
        self.children: list[Node] = []
        """The model's guesses, likeliest first, and what was looked up."""
        self.branch: BlockTable | None = None
        """Set once expanded: a table that begins with the text up to here."""
        self.is_sent = False
        """Whether it was in the last proposal."""
        self.is_ahead: bool = parent is not None and parent.is_ahead
        """Whether it is a leaf of what was sent, or below one: where the text goes on if a whole path is accepted."""

    def unclaimed(self) -> float:
        """The chance that the text passes through here and goes on with none of the children."""
        return self.path * max(0.0, 1.0 - sum(child.chance for child in self.children))

    def text(self) -> list[int]:
        """The tokens below the root, down to this one."""
        tokens: list[int] = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


class GrowingTree:
    """Nodes below the last committed token, and the tables that hold them."""

    def __init__(
        self,
        memory: Memory,
        calibration: Calibration,
        is_greedy: bool,
        look_up: LookUp | None = None,
        max_depth: int = 0,
    ) -> None:
        self._memory = memory
        self._calibration = calibration
        self._look_up = look_up
        self._max_depth = max_depth
        """Of what is looked up ahead."""
        self.is_greedy = is_greedy
        """Whether the sequence's tokens are taken without noise: confidence means another thing then."""
        self.trunk = memory.new_table()
        """Begins with committed tokens: all of them once the root is expanded."""
        self.root = Node(0, None, 0)
        self.nodes: list[Node] = []
        """All but the root, parents first."""
        self.expanded_ahead = 0
        """Nodes that were expanded since the last proposal was sent."""

    @property
    def is_stored(self) -> bool:
        """Whether it holds any block."""
        return any(table.held for table in self._tables())

    def commit(self, tokens: Sequence[int]) -> None:
        """These follow the last committed token: where they lead is the root now, and what does not hang there goes."""
        node = self.root
        for token in tokens:
            child = next((child for child in node.children if child.token == token), None)
            self._observe(node, child)
            if child is None:
                stem = self._stem(node)
                self._memory.truncate(stem, min(stem.stored_len, node.length))
                self._replace(Node(tokens[-1], None, self.root.length + len(tokens)), stem)
                return
            node = child
        if node is not self.root:
            self._replace(node, self._stem(node))

    def restart(self, tokens: Sequence[int], is_greedy: bool) -> None:
        """Begin anew with `tokens`, of which what the trunk holds is kept, but for the last."""
        self.is_greedy = is_greedy
        stored = self.trunk.tokens
        limit = min(len(stored), len(tokens) - 1)
        agreed = next((place for place in range(limit) if stored[place] != tokens[place]), limit)
        self._memory.truncate(self.trunk, agreed)
        self._replace(Node(tokens[-1], None, len(tokens)), self.trunk)

    def forget(self) -> None:
        """Free all that is stored; what was guessed goes with it."""
        for table in self._tables():
            self._memory.release(table)
        self.trunk = self._memory.new_table()
        self.root = Node(self.root.token, None, self.root.length)
        self.nodes = []

    def table_for(self, node: Node, taken: Container[BlockTable]) -> BlockTable:
        """Where the node's token is to be stored: the table that ends with its parent, or a fork where it is `taken`.

        Whoever asks either gives it to `grow` or drops it.
        """
        parent = node.parent
        if parent is None:
            return self.trunk
        table = parent.branch
        if table is None:
            raise RuntimeError("a node is expanded before its parent")
        if table.stored_len == parent.length and table not in taken:
            return table
        return self._memory.fork(table, parent.length)

    def drop(self, node: Node, table: BlockTable) -> None:
        """The node was not expanded after all: give back what its table has beyond what was stored."""
        if node.parent is None:
            # Guesses are made after the root's token alone: it is the one that must go through again.
            self._memory.truncate(table, min(table.stored_len, node.length - 1))
        elif table is node.parent.branch:
            self._memory.truncate(table, table.stored_len)
        else:
            self._memory.release(table)

    def grow(self, node: Node, table: BlockTable, guesses: Sequence[Guess], born: int) -> None:
        """The node's token is stored in `table`, and these may follow it, likeliest first."""
        node.branch = table
        there = {child.token: child for child in node.children}
        for rank, (token, confidence) in enumerate(guesses):
            child = there.get(token)
            if child is None:
                child = Node(token, node, node.length + 1, born=born)
                node.children.append(child)
                self.nodes.append(child)
            child.rank, child.confidence = rank, confidence
        node.children.sort(key=lambda child: len(guesses) if child.rank is None else child.rank)
        self._weigh(node)
        if there:
            self._renew_paths(node)
        for child in node.children:
            self._look_ahead(child, born)
        self.expanded_ahead += 1

    def within(self, max_depth: int) -> list[Node]:
        """Nodes at most `max_depth` deep, likeliest first, parents before their children."""
        deepest = self.root.length + max_depth
        return sorted((node for node in self.nodes if node.length <= deepest), key=lambda node: -node.path)

    def send(self, nodes: Sequence[Node]) -> tuple[TokenTree, tuple[float, ...]]:
        """The tree of `nodes`, with the chance of each, and a note of what was sent.

        Each node is followed by its likeliest child, so that what is most probably accepted lies together.
        """
        for node in self.nodes:
            node.is_sent = False
        for node in nodes:
            node.is_sent = True
        self.expanded_ahead = 0
        self.root.is_ahead = not nodes
        for node in self.nodes:
            parent = node.parent
            above = parent is not None and parent.is_ahead
            node.is_ahead = above or (node.is_sent and not any(child.is_sent for child in node.children))
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        waiting = [(self.root, ROOT)]
        while waiting:
            node, place = waiting.pop()
            if node is not self.root:
                tokens.append(node.token)
                parents.append(place)
                probabilities.append(node.path)
                place = len(tokens) - 1
            sent = sorted((child for child in node.children if child.is_sent), key=lambda child: child.path)
            waiting.extend((child, place) for child in sent)
        return TokenTree(tuple(tokens), tuple(parents)), tuple(probabilities)

    def look_ahead(self, born: int) -> None:
        """Go on with what followed before, from the root and from wherever the tree ends."""
        if self._look_up is not None:
            for node in [self.root, *self.nodes]:
                if node is self.root or not node.children:
                    self._look_ahead(node, born)

    def _look_ahead(self, node: Node, born: int) -> None:
        """Hang below `node` what followed its text before, and below that what followed it, and so on."""
        if self._look_up is None or node.path < LEAST_PATH or node.length - self.root.length >= self._max_depth:
            return
        path = node.text()
        while node.length - self.root.length < self._max_depth and node.path >= LEAST_PATH:
            found = self._look_up(path)
            if found is None:
                return
            token, match = found
            is_leaf = not node.children
            child = next((child for child in node.children if child.token == token), None)
            if child is None:
                child = Node(token, node, node.length + 1, born=born)
                node.children.append(child)
                self.nodes.append(child)
            child.match = match
            self._weigh(node)
            if not is_leaf:
                self._renew_paths(node)
            path.append(token)
            node = child

    def _weigh(self, node: Node) -> None:
        """The chances of its children: what was looked up first, and what that leaves for the model's guesses."""
        guessed = [child for child in node.children if child.rank is not None]
        chances = self._calibration.chances([child.confidence for child in guessed], self._kind(node))
        for child, chance in zip(guessed, chances, strict=True):
            child.chance = chance
        for child in node.children:
            if child.match:
                before = child.chance if child.rank is not None else 0.0
                child.chance = self._calibration.lookups.chance(child.match, _agreement(node, child), self.is_greedy)
                left = (1.0 - child.chance) / max(1.0 - before, 1e-6)
                for other in node.children:
                    if other is not child:
                        other.chance *= min(1.0, left) if before < 1.0 else 0.0
        for child in node.children:
            child.path = node.path * child.chance

    def _observe(self, node: Node, taken: Node | None) -> None:
        """The target took this child of `node`, or none of them."""
        guessed = [child for child in node.children if child.rank is not None]
        if guessed:
            place = guessed.index(taken) if taken in guessed else None
            self._calibration.observe([child.confidence for child in guessed], place, self._kind(node))
        for child in node.children:
            if child.match:
                self._calibration.lookups.observe(
                    child.match, _agreement(node, child), self.is_greedy, hit=child is taken
                )

    def _kind(self, node: Node) -> Kind:
        """Of the guesses below `node`."""
        return KINDS[self.is_greedy, node.rank == 0]

    def _stem(self, node: Node) -> BlockTable:
        """The table that goes on after `node`, or after as much before it as is stored."""
        if node.branch is not None:
            return node.branch
        above = node.parent
        while above is not None and above.branch is None:
            above = above.parent
        if above is None or above.branch is None:
            return self.trunk
        # Of an unexpanded node's siblings none will be asked for again: the table above may end before them.
        self._memory.truncate(above.branch, min(above.branch.stored_len, above.length))
        return above.branch

    def _replace(self, root: Node, trunk: BlockTable) -> None:
        """Keep `trunk` and what hangs below `root`."""
        before = set(self._tables())
        root.parent = None
        root.chance = root.path = 1.0
        self.root, self.trunk = root, trunk
        self.nodes = list(_below(root))
        self._renew_paths(root)
        for table in before.difference(self._tables()):
            self._memory.release(table)

    def _renew_paths(self, node: Node) -> None:
        """The chances of its children have changed."""
        for below in _below(node):
            if below.parent is not None:
                below.path = below.parent.path * below.chance

    def _tables(self) -> set[BlockTable]:
        return {self.trunk, *(node.branch for node in self.nodes if node.branch is not None)}


def _below(root: Node) -> Iterator[Node]:
    """Parents before their children."""
    level = root.children
    while level:
        yield from level
        level = [child for node in level for child in node.children]


def _agreement(node: Node, child: Node) -> Agreement:
    """What the model makes of a child that was looked up."""
    if node.branch is None:
        return Agreement.UNASKED
    if child.rank is None:
        return Agreement.NONE
    return Agreement.FIRST if child.rank == 0 else Agreement.LATER
