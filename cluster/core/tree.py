"""The token tree, the form of every draft.

The root of a tree is the last committed token. Node `i` has the token `tokens[i]`; its parent is node `parents[i]`,
or the root if `parents[i] == ROOT`. Parents come before their children (topological order), and siblings have
distinct tokens, so the walk from the root is unambiguous. A chain is a tree without branches. The empty tree means
plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.core.errors import InvalidRequest

ROOT = -1


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Tokens `[n]` and parents `[n]` of the nodes.

    Raises `InvalidRequest` if the arrays differ in length, a parent does not come before its child, or two siblings
    are equal.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise InvalidRequest("tree.parents", len(self.parents), f"as many as tokens ({len(self.tokens)})")
        seen: set[tuple[int, int]] = set()
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not ROOT <= parent < node:
                raise InvalidRequest(f"tree.parents[{node}]", parent, f"between -1 and {node - 1}")
            if (parent, token) in seen:
                raise InvalidRequest(f"tree.tokens[{node}]", token, f"unlike its siblings under node {parent}")
            seen.add((parent, token))

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> TokenTree:
        """Return the tree in which each token is the child of the one before."""
        tokens = tuple(tokens)
        return cls(tokens, tuple(range(ROOT, len(tokens) - 1)))

    @classmethod
    def from_candidates(cls, candidates: Iterable[Sequence[int]], max_nodes: int) -> TokenTree:
        """Merge candidate continuations into a trie of at most `max_nodes` nodes.

        Earlier candidates get their nodes first, so the most probable should come first.
        """
        tokens: list[int] = []
        parents: list[int] = []
        index: dict[tuple[int, int], int] = {}
        for candidate in candidates:
            node = ROOT
            for token in candidate:
                child = index.get((node, token))
                if child is None:
                    if len(tokens) >= max_nodes:
                        break
                    child = len(tokens)
                    index[(node, token)] = child
                    tokens.append(token)
                    parents.append(node)
                node = child
        return cls(tuple(tokens), tuple(parents))

    def first(self, count: int) -> TokenTree:
        """Return the tree of the first `count` nodes. Parents come first, so it is one."""
        return self if count >= len(self.tokens) else TokenTree(self.tokens[:count], self.parents[:count])

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    def depths(self) -> tuple[int, ...]:
        """Return the depth `[n]` of each node. Children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def depth(self) -> int:
        """Return the length of the longest path, in tokens; 0 for the empty tree."""
        return max(self.depths()) if self.parents else 0

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root's child to `node`, inclusive; `()` for `ROOT`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Return the tokens along `path(node)`."""
        return tuple(self.tokens[step] for step in self.path(node))

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` (or of `ROOT`) with `token`; `None` if there is none."""
        for candidate in range(node + 1, len(self.tokens)):
            if self.parents[candidate] == node and self.tokens[candidate] == token:
                return candidate
        return None

    def children(self, node: int) -> tuple[int, ...]:
        """Return the children of `node` (or of `ROOT`), in order."""
        return tuple(child for child in range(node + 1, len(self.tokens)) if self.parents[child] == node)

    def follow(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """Return the nodes from the root along `tokens`, as far as the tree has them."""
        nodes: list[int] = []
        node: int | None = ROOT
        for token in tokens:
            node = self.child(ROOT if node is None else node, token)
            if node is None:
                break
            nodes.append(node)
        return tuple(nodes)

    def leaves(self) -> tuple[int, ...]:
        """Return the nodes without children, in order."""
        inner = set(self.parents)
        return tuple(node for node in range(len(self.tokens)) if node not in inner)

    def candidates(self) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of all root-to-leaf paths. `from_candidates` builds an equal trie from them."""
        return tuple(self.path_tokens(leaf) for leaf in self.leaves())

    def within(self, max_nodes: int, max_depth: int) -> tuple[int, ...]:
        """Return the first `max_nodes` nodes of depth at most `max_depth`. Their parents are among them."""
        if len(self) <= max_nodes and len(self) <= max_depth:
            return tuple(range(len(self)))
        return tuple(node for node, depth in enumerate(self.depths()) if depth <= max_depth)[: max(0, max_nodes)]

    def subset(self, nodes: Sequence[int]) -> TokenTree:
        """Return the tree of `nodes`, which ascend. Raises `InvalidRequest` if a parent is not among them."""
        if len(nodes) == len(self):
            return self
        renamed: dict[int, int] = {ROOT: ROOT}
        for position, node in enumerate(nodes):
            if self.parents[node] not in renamed:
                raise InvalidRequest("nodes", node, f"together with its parent {self.parents[node]}")
            renamed[node] = position
        return TokenTree(
            tuple(self.tokens[node] for node in nodes), tuple(renamed[self.parents[node]] for node in nodes)
        )


EMPTY_TREE = TokenTree()
