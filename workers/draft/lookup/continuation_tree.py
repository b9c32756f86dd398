"""Merges possible continuations of a text into the draft tree with the most probable nodes."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import ANY_TOKENS, NextTokens
from cluster.core.tree import EMPTY_TREE, ROOT, TokenTree

LEAST_PATH_PROBABILITY = 0.01
"""Nodes with a lower path probability are not drafted."""
_LARGEST_DIFFERENCE = 30
"""Larger differences of match lengths count as this difference."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens that may follow, because they followed or are expected to follow the same tokens elsewhere."""

    tokens: Sequence[int]
    match_length: int
    """Number of tokens before them that are equal."""
    origin: DraftOrigin = DraftOrigin.REQUEST
    """Where these tokens are."""


class Estimate(Protocol):
    """Estimates how likely the target takes a token."""

    def __call__(self, weight: float, total: float, match_length: int) -> float:
        """Return the probability of the token, given the tokens before it.

        `weight` of the `total` weight of all continuations have the token there. `match_length` is the longest match
        before it, the path in the tree included.
        """


@dataclass(frozen=True, slots=True)
class ContinuationTree:
    """A draft tree with an estimate per node."""

    tree: TokenTree = EMPTY_TREE
    probabilities: tuple[float, ...] = ()
    """Probability, per node, that all tokens down to it are accepted."""
    conditionals: tuple[float, ...] = ()
    """Probability, per node, that it is accepted if its parent is."""
    is_prunable: bool = True
    """Whether the coordinator may remove nodes of it; see `Proposal`."""
    origins: tuple[DraftOrigin, ...] = ()
    """Where each node comes from: the first of its continuations' origins. See `Proposal`."""


def merge(
    continuations: Sequence[Continuation],
    max_nodes: int,
    max_depth: int,
    estimate: Estimate,
    ends: Collection[int] = (),
    known: NextTokens = ANY_TOKENS,
) -> ContinuationTree:
    """Return the tree of the at most `max_nodes` most probable nodes, best first (as in SuffixDecoding, Oliaro et al.
    2024). A continuation counts half as much as one whose match is one token longer. Nothing follows a token of `ends`,
    there is no token that the grammar does not permit, and one that it forces is sure, as far as that is `known`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    conditionals: list[float] = []
    origins: list[DraftOrigin] = []
    serial = 0
    # Minus the path probability, a serial number that breaks ties, the conditional probability, the token, its parent,
    # its depth and the continuations through it.
    heap: list[tuple[float, int, float, int, int, int, Sequence[Continuation]]] = []

    def push_children(members: Sequence[Continuation], parent: int, depth: int, path: float) -> None:
        nonlocal serial
        for token, conditional, through in _children(members, depth, estimate, known):
            if path * conditional >= LEAST_PATH_PROBABILITY:
                serial += 1
                heapq.heappush(heap, (-path * conditional, serial, conditional, token, parent, depth, through))

    if max_nodes > 0 and max_depth > 0:
        push_children(continuations, ROOT, 1, 1.0)
    while heap and len(tokens) < max_nodes:
        path, _, conditional, token, parent, depth, members = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        probabilities.append(-path)
        conditionals.append(conditional)
        origins.append(min([member.origin for member in members]))
        if depth < max_depth and token not in ends:
            push_children(members, len(tokens) - 1, depth + 1, -path)
    return ContinuationTree(
        TokenTree(tuple(tokens), tuple(parents)), tuple(probabilities), tuple(conditionals), origins=tuple(origins)
    )


def _children(
    members: Sequence[Continuation], depth: int, estimate: Estimate, known: NextTokens
) -> list[tuple[int, float, list[Continuation]]]:
    """Return token, conditional probability and continuations of each child. The probabilities sum to 1 at most."""
    groups: dict[int, list[Continuation]] = {}
    longest = 0
    for member in members:
        if len(member.tokens) >= depth and known.permits(depth - 1, member.tokens[depth - 1]):
            groups.setdefault(member.tokens[depth - 1], []).append(member)
            longest = max(longest, member.match_length)
    weights = [
        sum(2.0 ** -min(longest - member.match_length, _LARGEST_DIFFERENCE) for member in through)
        for through in groups.values()
    ]
    if depth <= len(known.forced):
        return [(token, 1.0, through) for token, through in groups.items()]
    total, match_length = sum(weights), longest + depth - 1
    estimates = [estimate(weight, total, match_length) for weight in weights]
    scale = max(1.0, sum(estimates))
    return [(token, value / scale, through) for (token, through), value in zip(groups.items(), estimates, strict=True)]
