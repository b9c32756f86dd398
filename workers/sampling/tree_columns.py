"""The draft trees of a step as columns of numbers: one operation for the nodes of all trees, not a loop over each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from cluster.core.tree import TokenTree

Integers = npt.NDArray[np.int64]
_WORD = 64


class TreeColumns:
    """`n` nodes of several trees, one tree after another."""

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        self.sizes: Integers = np.array([len(tree.parents) for tree in trees], dtype=np.int64)
        """`[trees]`: the number of nodes."""
        parents = np.array(list(chain.from_iterable(tree.parents for tree in trees)), dtype=np.int64)
        self.firsts: Integers = np.cumsum(self.sizes) - self.sizes if len(parents) else self.sizes
        """`[trees]`: the first node of each."""
        self.trees: Integers = np.repeat(np.arange(len(trees)), self.sizes) if len(parents) else parents
        """`[n]`: the tree of each node."""
        self.places: Integers = np.arange(len(parents)) - self.firsts[self.trees] if len(parents) else parents
        """`[n]`: the number of each node in its tree."""
        self._parents = parents
        self.are_chains = not len(parents) or bool((parents == self.places - 1).all())
        """Whether every node is the child of the one before it in its tree."""

    def _above(self) -> Integers:
        """`[n]`: the parent of each node among all nodes; -1 for children of a root."""
        above: Integers = np.where(self._parents < 0, -1, self._parents + self.firsts[self.trees])
        return above

    @cached_property
    def depths(self) -> Integers:
        """`[n]`: the depth of each node. Children of a root have depth 1."""
        if self.are_chains:
            return self.places + 1
        depths, above = np.ones_like(self.places), self._above()
        # `depths` counts the nodes from each node up to the one before `above`, twice as many each time.
        while (inner := np.flatnonzero(above >= 0)).size:
            depths[inner] += depths[above[inner]]
            above[inner] = above[above[inner]]
        return depths

    def ancestors(self) -> npt.NDArray[np.uint64]:
        """`[n, words]`: each node and its ancestors as bits: bit `i % 64` of word `i // 64` is node `i` of its tree."""
        words = -(-int(self.sizes.max(initial=0)) // _WORD)
        own = np.left_shift(np.uint64(1), (self.places % _WORD).astype(np.uint64))
        if self.are_chains and words == 1:
            return (own | (own - np.uint64(1)))[:, None]
        seen = np.zeros((len(own), words), dtype=np.uint64)
        seen[np.arange(len(seen)), self.places // _WORD] = own
        above = self._above()
        while (inner := np.flatnonzero(above >= 0)).size:
            seen[inner] |= seen[above[inner]]
            above[inner] = above[above[inner]]
        return seen
