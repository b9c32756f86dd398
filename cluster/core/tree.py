"""The token tree: what every drafter yields and the one thing the verifier reads.

A tree hangs below the last committed token. Node `i` carries `tokens[i]` and hangs under node
`parents[i]`, or under the committed token itself when `parents[i] == ROOT`. Parents come before
their children (topological order), and no two siblings carry the same token, so that a walk from
the root is unambiguous. A chain is the narrow case; the empty tree is plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.core.errors import InvalidRequest

ROOT = -1


@dataclass(frozen=True, slots=True)
class TokenTree:
    """`tokens[n]`, `parents[n]`; valid by construction.

    Raises `InvalidRequest` when the arrays differ in length, a parent does not come before its
    child, or two siblings are equal.
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
        """The narrow tree: each token under the one before."""
        tokens = tuple(tokens)
        return cls(tokens, tuple(range(ROOT, len(tokens) - 1)))

    @classmethod
    def from_candidates(cls, candidates: Iterable[Sequence[int]], max_nodes: int) -> TokenTree:
        """Merge candidate continuations into a trie of at most `max_nodes` nodes.

        Earlier candidates win their nodes first, so give the likeliest first.
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

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs under the one before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the committed token; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def depth(self) -> int:
        """The longest path, in tokens; 0 when empty."""
        return max(self.depths(), default=0)

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the root's child down to `node`, inclusive; `()` for `ROOT`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """The tokens along `path(node)`."""
        return tuple(self.tokens[step] for step in self.path(node))

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (or of `ROOT`) that carries `token`."""
        for candidate in range(node + 1, len(self.tokens)):
            if self.parents[candidate] == node and self.tokens[candidate] == token:
                return candidate
        return None

    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, in order."""
        inner = set(self.parents)
        return tuple(node for node in range(len(self.tokens)) if node not in inner)

    def candidates(self) -> tuple[tuple[int, ...], ...]:
        """The root-to-leaf token paths: `from_candidates` of them gives this tree's trie again."""
        return tuple(self.path_tokens(leaf) for leaf in self.leaves())

    def ancestor_mask(self) -> tuple[tuple[bool, ...], ...]:
        """`mask[i][j]`: node `i` sees node `j`, because `j` is `i` itself or one of its ancestors."""
        rows: list[tuple[bool, ...]] = []
        for node, parent in enumerate(self.parents):
            row = list(rows[parent]) if parent != ROOT else [False] * len(self.tokens)
            row[node] = True
            rows.append(tuple(row))
        return tuple(rows)

    def within(self, max_nodes: int, max_depth: int) -> tuple[int, ...]:
        """The first `max_nodes` nodes that lie at most `max_depth` deep: their parents are among them."""
        if len(self) <= max_nodes and len(self) <= max_depth:
            return tuple(range(len(self)))
        return tuple(node for node, depth in enumerate(self.depths()) if depth <= max_depth)[: max(0, max_nodes)]

    def subset(self, nodes: Sequence[int]) -> TokenTree:
        """The tree of `nodes` alone, ascending. Raises `InvalidRequest` when a parent is not among them."""
        if len(nodes) == len(self):
            return self
        renamed: dict[int, int] = {ROOT: ROOT}
        for place, node in enumerate(nodes):
            if self.parents[node] not in renamed:
                raise InvalidRequest("nodes", node, f"kept with its parent {self.parents[node]}")
            renamed[node] = place
        return TokenTree(
            tuple(self.tokens[node] for node in nodes), tuple(renamed[self.parents[node]] for node in nodes)
        )

    def truncated(self, max_nodes: int, max_depth: int) -> TokenTree:
        """The first `max_nodes` nodes that lie at most `max_depth` deep (still a valid tree)."""
        return self.subset(self.within(max_nodes, max_depth))


EMPTY_TREE = TokenTree()
