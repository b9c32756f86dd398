"""How much to guess: the trees that let the most tokens be committed per second, down to none at all.

Goodput is the tokens that a round is expected to commit ÷ the time it is expected to take (SmartSpec, Liu et al. 2024).
A node is worth its place if the chance that the text passes through it raises the quotient. No node is likelier than
its parent, so the likeliest nodes of a tree are a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.speculation.latency import Durations


@dataclass(frozen=True, slots=True)
class Prospect:
    """What one sequence's tree would be like, before anybody was asked for it."""

    chances: tuple[float, ...]
    """Of its best nodes, never rising; no longer than the tree may be."""
    reach: tuple[int, ...]
    """How deep the drafter must go for the first nodes, up to each; never falling."""
    max_depth: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Whom to ask for how many nodes, and what is to be had of it."""

    nodes: tuple[int, ...]
    """One per prospect."""
    goodput: float
    """Tokens per second with them."""
    plain: float
    """Tokens per second with no guesses."""

    @property
    def advantage(self) -> float:
        """How many times faster than plain decoding."""
        return self.goodput / self.plain


def choose(prospects: Sequence[Prospect], steps: Durations, proposals: Durations, rows: int = 0) -> Choice:
    """Size the trees of one round, likeliest nodes of all sequences first, and stop where goodput is highest.

    `rows`: sequences that decide in the same step, at least all prospects. The wait for proposals grows with the rows
    that are asked and with the deepest of their trees.
    """
    rows = max(rows, len(prospects))
    ranked = sorted(
        ((chance, -rank, index) for index, one in enumerate(prospects) for rank, chance in enumerate(one.chances)),
        reverse=True,
    )
    plain = rows / steps.seconds(rows, rows)
    best_goodput, best_count = plain, 0
    seconds = steps.seconds_upto(rows, rows, rows + len(ranked))
    expected, asked, depth, wait = float(rows), set[int](), 0, 0.0
    for count, (chance, rank, index) in enumerate(ranked, start=1):
        expected += chance
        reach = min(prospects[index].reach[-rank], prospects[index].max_depth)
        if index not in asked or reach > depth:
            asked.add(index)
            depth = max(depth, reach)
            wait = proposals.seconds(len(asked), depth)
        goodput = expected / (wait + seconds[count])
        if goodput > best_goodput:
            best_goodput, best_count = goodput, count
    nodes = [0] * len(prospects)
    for _, _, index in ranked[:best_count]:
        nodes[index] += 1
    return Choice(tuple(nodes), best_goodput, plain)


@dataclass(frozen=True, slots=True)
class Kept:
    """Which nodes are worth verifying."""

    nodes: tuple[tuple[int, ...], ...]
    """Of each tree, ascending."""
    expected: float
    """Tokens that the round will commit."""
    seconds: float
    """That its step will take."""


def keep(trees: Sequence[Sequence[float]], steps: Durations, rows: int, tokens: int, waited: float) -> Kept:
    """Keep the nodes that pay. `trees`: each node's chance, parents before children and never below them.

    `rows` decide in a step that has `tokens` tokens without trees; `waited` seconds of the round are gone. What prompts
    in the step take is not counted: they must go through anyway, and would make every guess beside them look cheap.
    """
    ranked = sorted(
        ((-chance, node, index) for index, chances in enumerate(trees) for node, chance in enumerate(chances))
    )
    seconds = steps.seconds_upto(rows, tokens, tokens + len(ranked))
    waited -= seconds[0] - steps.seconds(rows, rows) if tokens > rows else 0.0
    expected = best_expected = float(rows)
    best_goodput, best_count = expected / (waited + seconds[0]), 0
    for count, (chance, _, _) in enumerate(ranked, start=1):
        expected -= chance
        goodput = expected / (waited + seconds[count])
        if goodput > best_goodput:
            best_goodput, best_count, best_expected = goodput, count, expected
    nodes: list[list[int]] = [[] for _ in trees]
    for _, node, index in ranked[:best_count]:
        nodes[index].append(node)
    return Kept(tuple(tuple(sorted(some)) for some in nodes), best_expected, seconds[best_count])


def budget(nodes: int, reach: int, most: DraftBudget) -> DraftBudget:
    """What to ask for where `nodes` are wanted: half as many more, so that there is a choice, and no deeper."""
    if not nodes:
        return NO_DRAFT
    return DraftBudget(min(most.max_nodes, nodes + max(1, nodes // 2)), min(most.max_depth, reach))
