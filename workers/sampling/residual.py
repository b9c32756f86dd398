"""Distributions of rejection sampling: the draft's, and what rejections leave of the target's; and draws from them.

A rule looks up the target's probabilities of drafted tokens at all nodes that it may come to, walks the trees on the
host, and then draws the last tokens of all trees together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from cluster.core.drafting import DraftDistribution
from cluster.core.tree import TokenTree
from workers.sampling.acceptance import Accepted, DecidedTree
from workers.sampling.row_sums import drawn_by_pairs, sums_by_halves
from workers.transfer import HostCopies, row_indices, tensor_on, to_host_together

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Probabilities processed at a time. The limit bounds copies in float64, and on a CPU keeps them in cache."""


def draft_probabilities(
    tree: TokenTree, node: int, distributions: Sequence[DraftDistribution], rejected: Collection[int] = ()
) -> Mapping[int, float]:
    """The distribution that the token of `node` was drawn from, by token.

    It is the node's distribution without the tokens of its earlier siblings, `rejected`, and normalised. A node of a
    tree without `distributions` is deterministic. Empty if the distribution has no other tokens.
    """
    if not distributions:
        return {tree.tokens[node]: 1.0}
    stated = distributions[node]
    kept = {
        token: probability
        for token, probability in zip(stated.tokens, stated.probabilities, strict=True)
        if token not in rejected
    }
    total = sum(kept.values())
    return {token: probability / total for token, probability in kept.items()} if total > 0.0 else {}


@dataclass(frozen=True, slots=True)
class Weights:
    """A distribution over the vocabulary, not normalised: what drafts and rejections leave of the target's."""

    row: int
    """The row of log-probabilities that it is made of."""
    named: Mapping[int, float] = field(default_factory=dict)
    """Weights of some tokens."""
    others: float = 0.0
    """The sum of the weights of all other tokens."""
    scale: float = 1.0
    """The weight of each other token, divided by the target's probability of it."""

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return self.others + sum(self.named.values())

    def times(self, factor: float) -> Weights:
        """All weights, multiplied by a factor."""
        named = {token: weight * factor for token, weight in self.named.items()}
        return Weights(self.row, named, self.others * factor, self.scale * factor)

    def without(self, draft: Mapping[int, float]) -> Weights:
        """max(p − q, 0) for these weights p and a draft's probabilities q.

        Tokens of the draft that are not named are left out: the target does not have them.
        """
        named = {token: max(0.0, weight - draft.get(token, 0.0)) for token, weight in self.named.items()}
        return Weights(self.row, named, self.others, self.scale)


Walk = Callable[[DecidedTree, Callable[[int], Weights]], tuple[list[int], Weights, float]]
"""Walks a tree, given a function from a node to the target's distribution after it, in which the tokens of the drafts
after the node are named. Returns the accepted nodes, what the last token is drawn from, and the uniform number that it
is drawn with."""


def launch_draws(
    steps: Sequence[DecidedTree], log_probabilities: Tensor | None, copies: HostCopies, walk: Walk
) -> Callable[[Sequence[DecidedTree]], list[Accepted]]:
    """`AcceptsTogether.launch` of a rule that accepts what `walk` says, and at temperature 0 what is decided."""
    firsts = [0, *accumulate(len(step.decisions) for step in steps)]
    drafted: dict[int, dict[int, None]] = {}
    for step, first in zip(steps, firsts, strict=False):
        if step.root.is_greedy:
            continue
        step.check_log_probabilities()
        for node, (token, parent) in enumerate(zip(step.tree.tokens, step.tree.parents, strict=True)):
            stated = step.distributions[node].tokens if step.distributions else ()
            drafted.setdefault(first + parent + 1, {}).update(dict.fromkeys((token, *stated)))
    target = Weights if log_probabilities is None else look_up(log_probabilities, drafted, copies)

    def after(first: int, node: int) -> Weights:
        return target(first + node + 1)

    def accepted(decided: Sequence[DecidedTree]) -> list[Accepted]:
        walked = [
            None if step.root.is_greedy else walk(step, partial(after, first))
            for step, first in zip(decided, firsts, strict=False)
        ]
        drawing = [one for one in walked if one is not None]
        drawn: list[int] = []
        if log_probabilities is not None:
            drawn = draw(log_probabilities, [left for _, left, _ in drawing], [number for *_, number in drawing])
        last = iter(drawn)
        return [
            step.walk() if one is None else step.accepted(one[0], next(last))
            for step, one in zip(decided, walked, strict=True)
        ]

    return accepted


def look_up(
    log_probabilities: Tensor, tokens: Mapping[int, Collection[int]], copies: HostCopies
) -> Callable[[int], Weights]:
    """Look up the target's probabilities of some `tokens` of rows of log-probabilities [n, vocab].

    Returns a function from a row to the target's distribution, in which these tokens are named; rows that were not
    looked up name none. Tokens beyond the vocabulary are left out. The numbers are copied to the host with all other
    `copies`.
    """
    size = log_probabilities.shape[1]
    named = {row: [token for token in wanted if token < size] for row, wanted in tokens.items()}
    rows = [row for row, wanted in named.items() if wanted]
    if not rows:
        return Weights
    owners, columns = _entries(log_probabilities, [(row, token) for row in rows for token in named[row]])
    found = [log_probabilities[owners, columns].double().exp()]
    for part in _chunks(rows, size, log_probabilities):
        entries = [(place, token) for place, row in enumerate(part) for token in named[row]]
        left = log_probabilities[row_indices(part, log_probabilities)].double().exp_()
        left[_entries(left, entries)] = 0.0
        found.append(sums_by_halves(left))
    copied = copies.add(torch.cat(found))
    firsts = accumulate((len(named[row]) for row in rows), initial=0)
    sums = range(len(found[0]), len(found[0]) + len(rows))
    places = {row: (first, place) for row, first, place in zip(rows, firsts, sums, strict=False)}
    """Where the numbers of a row begin, and where its sum is."""

    def of(row: int) -> Weights:
        if row not in places:
            return Weights(row)
        numbers, (first, place) = copied(), places[row]
        own = numbers[first : first + len(named[row])].tolist()
        return Weights(row, dict(zip(named[row], own, strict=True)), float(numbers[place]))

    return of


def draw(log_probabilities: Tensor, weights: Sequence[Weights], numbers: Sequence[float]) -> list[int]:
    """For each distribution, the token at which the cumulated weights exceed the uniform number times their sum.

    Each token is drawn with a probability in proportion to its weight. It is -1 if all weights are 0. The host waits
    for the device of the log-probabilities [n, vocab] once.
    """
    found: list[Tensor] = []
    size = log_probabilities.shape[1]
    for part in _chunks(range(len(weights)), size, log_probabilities):
        own = [weights[index] for index in part]
        scales = tensor_on(log_probabilities.device, [[one.scale] for one in own], torch.float64)
        left = log_probabilities[row_indices([one.row for one in own], log_probabilities)].double().exp_().mul_(scales)
        entries = [(place, token, weight) for place, one in enumerate(own) for token, weight in one.named.items()]
        if entries:
            values = tensor_on(left.device, [weight for *_, weight in entries], torch.float64)
            left[_entries(left, [(place, token) for place, token, _ in entries])] = values
        found.append(drawn_by_pairs(left, tensor_on(left.device, [[numbers[index]] for index in part], torch.float64)))
    drawn: list[int] = to_host_together([torch.cat(found)])[0].tolist() if found else []
    return drawn


def _chunks(rows: Sequence[int], size: int, like: Tensor) -> Iterator[Sequence[int]]:
    count = max(1, _CHUNK_ELEMENTS.get(like.device.type, 1 << 25) // max(1, size))
    return (rows[first : first + count] for first in range(0, len(rows), count))


def _entries(like: Tensor, places: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Rows and columns as indices on the device of `like`: int64 [n] each."""
    rows, columns = tensor_on(like.device, places, torch.int64).unbind(dim=1)
    return rows, columns
