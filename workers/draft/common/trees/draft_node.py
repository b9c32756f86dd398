"""One node of a draft tree."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from cluster.core.draft_origin import DraftOrigin
from cluster.core.tree import ROOT, TokenTree
from workers.kv.block_table import BlockTable

ChosenTree = tuple[TokenTree, tuple[float, ...], tuple[DraftOrigin, ...]]
"""A tree, and per node its path probability and its origin."""


class DraftNode:
    """A drafted token at its position; the root stands for the last committed token.

    A node is *expanded* once its token has gone through the model: its keys and values are stored in `table`, and the
    model's candidates are among its children.
    """

    __slots__ = (
        "children",
        "confidence",
        "created_in_call",
        "is_beyond_proposal",
        "is_proposed",
        "length",
        "match_length",
        "parent",
        "path_probability",
        "probability",
        "rank",
        "table",
        "token",
    )

    def __init__(self, token: int, parent: DraftNode | None, length: int, created_in_call: int = 0) -> None:
        self.token = token
        self.parent = parent
        self.length = length
        """Number of tokens of the sequence up to and including this one."""
        self.confidence = 1.0
        """The draft model's own probability of this token."""
        self.probability = 1.0
        """Estimated probability that the target takes this token, given that it takes the parent's."""
        self.path_probability = 1.0
        """Estimated probability that the target takes every token from the root down to this one."""
        self.rank: int | None = None
        """Index among the model's candidates below the parent; `None` for a token that only a lookup found."""
        self.match_length = 0
        """Number of tokens before this one that matched earlier text when it was looked up; 0 without a lookup."""
        self.created_in_call = created_in_call
        """Number of the `propose` call during or after which this node was created."""
        self.children: list[DraftNode] = []
        """The model's candidates, most probable first, then tokens that only a lookup found."""
        self.table: BlockTable | None = None
        """Block table that begins with all tokens up to this one; set once the node is expanded."""
        self.is_proposed = False
        """Whether this node was in the last proposal."""
        self.is_beyond_proposal: bool = parent is not None and parent.is_beyond_proposal
        """Whether this node is a leaf of the last proposal or below one."""

    def uncovered_probability(self) -> float:
        """Estimated probability that the target takes the path to this node, and then none of its children."""
        return self.path_probability * max(0.0, 1.0 - sum(child.probability for child in self.children))

    def path_tokens(self) -> list[int]:
        """Tokens below the root, down to and including this one."""
        tokens: list[int] = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]

    def child(self, token: int) -> DraftNode | None:
        """The child with this token, if there is one."""
        return next((child for child in self.children if child.token == token), None)

    def descendants(self) -> Iterator[DraftNode]:
        """All nodes below this one, parents before their children."""
        level = self.children
        while level:
            yield from level
            level = [child for node in level for child in node.children]

    def update_path_probabilities(self) -> None:
        """Recompute the path probabilities of all descendants from their own probabilities."""
        for node in self.descendants():
            if node.parent is not None:
                node.path_probability = node.parent.path_probability * node.probability

    @property
    def origin(self) -> DraftOrigin:
        """The request itself if a lookup in its text found the token, whether or not the model drafts it too."""
        return DraftOrigin.REQUEST if self.match_length else DraftOrigin.TRAINED

    def chosen_tree(self, chosen: Collection[DraftNode]) -> ChosenTree:
        """The tree of the chosen nodes below this one, their path probabilities and their origins.

        Each node is followed by its most probable child, so that the most probable path is contiguous. The parent of a
        chosen node is this node or chosen.
        """
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        origins: list[DraftOrigin] = []
        stack = [(self, ROOT)]
        while stack:
            node, index = stack.pop()
            if node is not self:
                tokens.append(node.token)
                parents.append(index)
                probabilities.append(node.path_probability)
                origins.append(node.origin)
                index = len(tokens) - 1
            children = (child for child in node.children if child in chosen)
            stack.extend((child, index) for child in sorted(children, key=lambda child: child.path_probability))
        return TokenTree(tuple(tokens), tuple(parents)), tuple(probabilities), tuple(origins)
