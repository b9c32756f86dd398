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
        self.firsts: Integers = np.cumsum(self.sizes) - self.sizes
        """`[trees]`: the first node of each."""
        count = int(self.sizes.sum())
        self.trees: Integers = np.repeat(np.arange(len(trees)), self.sizes)
        """`[n]`: the tree of each node."""
        self.places: Integers = np.arange(count) - self.firsts[self.trees]
        """`[n]`: the number of each node in its tree."""
        parents = np.fromiter(chain.from_iterable(tree.parents for tree in trees), dtype=np.int64, count=count)
        self._are_chains = bool((parents == self.places - 1).all())
        self.above: Integers = np.where(parents < 0, -1, parents + self.firsts[self.trees])
        """`[n]`: the parent of each node among all nodes; -1 for children of a root."""

    @cached_property
    def depths(self) -> Integers:
        """`[n]`: the depth of each node. Children of a root have depth 1."""
        if self._are_chains:
            return self.places + 1
        depths, above = np.ones_like(self.above), self.above.copy()
        # `depths` counts the nodes from each node up to the one before `above`, twice as many each time.
        while (inner := np.flatnonzero(above >= 0)).size:
            depths[inner] += depths[above[inner]]
            above[inner] = above[above[inner]]
        return depths

    def ancestors(self) -> npt.NDArray[np.uint64]:
        """`[n, words]`: each node and its ancestors as bits: bit `i % 64` of word `i // 64` is node `i` of its tree."""
        words = -(-int(self.sizes.max(initial=0)) // _WORD)
        seen = np.zeros((len(self.above), words), dtype=np.uint64)
        own = np.left_shift(np.uint64(1), (self.places % _WORD).astype(np.uint64))
        seen[np.arange(len(seen)), self.places // _WORD] = own
        above = self.above.copy()
        while (inner := np.flatnonzero(above >= 0)).size:
            seen[inner] |= seen[above[inner]]
            above[inner] = above[above[inner]]
        return seen
