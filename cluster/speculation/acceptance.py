"""How good guesses are: what the target made of them, of one sequence and of all.

A *point* is a place on the committed path that had guesses below it; it is a hit when the target decided for one of
them. What a sequence shows counts for itself as far as it goes, and for the rest it is taken to be like the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cluster.core.drafting import DraftBudget
from cluster.core.tree import ROOT, TokenTree

_DEEPEST = 16
_WIDEST = 4
_UNSEEN = 2.0
"""Trees after which a node's place in the curve counts as much as the fall of the curve before it."""
_FADING = 0.98
"""Of what was seen of a place in the curve, with each tree that was too small to have it."""
_DOUBT = 20.0
"""Points after which a drafter's own view counts for half of what was seen of it."""
_OWN_DOUBT = 4.0
"""And of one sequence."""
_FALL = 0.6
"""Before anything was seen."""
_CERTAIN = 0.99
"""Nothing is more likely than this."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Hits against those that were expected; old ones fade."""

    hits: float = 0.0
    expected: float = 0.0

    def learned(self, hit: float, expected: float, memory: float) -> Tally:
        """With one more point; `memory` points count."""
        keep = 1 - 1 / memory
        return Tally(self.hits * keep + hit, self.expected * keep + expected)

    def ratio(self, doubt: float) -> float:
        """How many times more hits there are than expected; `doubt` points say: as many."""
        return (self.hits + doubt) / (self.expected + doubt)


@dataclass(frozen=True, slots=True)
class Curve:
    """The trees that come: the mean chance of their best node, of their second best, …; a missing node has none."""

    chances: tuple[float, ...] = ()
    depths: tuple[float, ...] = ()
    """How deep the first nodes reach, up to each."""
    weights: tuple[float, ...] = ()
    """Trees that each was learned from."""

    def learned(self, chances: Sequence[float], depths: Sequence[int], asked: int, memory: float) -> Curve:
        """With one more tree of `asked` nodes at most: its nodes' chances, best first, and their depths.

        Beyond `asked` nothing was seen.
        """
        mean, reach, weights = list(self.chances), list(self.depths), list(self.weights)
        deepest = 0
        for rank in range(asked):
            if rank == len(mean):
                mean.append(0.0)
                reach.append(float(rank + 1))
                weights.append(0.0)
            weight = weights[rank] = min(weights[rank] + 1, memory)
            chance = chances[rank] if rank < len(chances) else 0.0
            mean[rank] += (chance - mean[rank]) / weight
            if rank < len(depths):
                deepest = max(deepest, depths[rank])
                reach[rank] += (deepest - reach[rank]) / weight
        weights[asked:] = [weight * _FADING for weight in weights[asked:]]
        return Curve(tuple(mean), tuple(reach), tuple(weights))

    def beside(self, others: Curve, doubt: float, count: int) -> tuple[float, ...]:
        """What to expect of `count` nodes, never rising: this curve as far as it was seen, else that of the others.

        What was hardly seen of any is taken to fall as it fell before.
        """
        chances: list[float] = []
        before = latest = 1.0
        for rank in range(count):
            chance = latest * (latest / before if rank > 1 and before > 0 else _FALL)
            for curve, trust in ((others, _UNSEEN), (self, doubt)):
                if rank < len(curve.chances):
                    weight = curve.weights[rank]
                    chance += weight / (weight + trust) * (curve.chances[rank] - chance)
            before, latest = latest, min(latest, chance)
            chances.append(latest)
        return tuple(chances)

    def reach(self, count: int) -> int:
        """How deep a drafter goes for the best `count` nodes."""
        if not count:
            return 0
        if count <= len(self.depths):
            return max(1, round(self.depths[count - 1]))
        return count if not self.depths else max(1, round(self.depths[-1])) + count - len(self.depths)

    def within(self, asked: DraftBudget) -> int:
        """How many of the best nodes are to be seen in a tree of this size; deeper ones may be missing from it."""
        if asked.max_depth >= max(self.reach(asked.max_nodes), 1):
            return asked.max_nodes
        return sum(self.reach(count) <= asked.max_depth for count in range(1, asked.max_nodes + 1))


@dataclass(frozen=True, slots=True)
class Record:
    """Of one sequence."""

    curve: Curve = field(default_factory=Curve)
    tally: Tally = field(default_factory=Tally)


def _first_rates() -> tuple[Tally, ...]:
    """Six of ten first guesses right, few of the rest: soon replaced."""
    likely = (0.6, 0.15, 0.08, 0.05)
    return tuple(Tally(2 * likely[rank], 2.0) for _ in range(_DEEPEST) for rank in range(_WIDEST))


@dataclass(frozen=True, slots=True)
class Experience:
    """Of all sequences."""

    rates: tuple[Tally, ...] = field(default_factory=_first_rates)
    """By depth and by place among siblings: for drafters that cannot tell how likely a guess is."""
    trust: Tally = field(default_factory=Tally)
    """Of drafters that can."""
    curve: Curve = field(default_factory=Curve)
    recent: Tally = field(default_factory=Tally)
    """Of the latest points: what changes is seen here first."""

    @property
    def realism(self) -> float:
        """How many times more of what is expected comes true, of late; never more than once."""
        return min(1.0, self.recent.ratio(_OWN_DOUBT))

    def conditionals(self, tree: TokenTree, told: Sequence[float]) -> list[float]:
        """Each node's chance once its parent is committed, by what all sequences showed; `told`: the drafter's view."""
        if told:
            trust = self.trust.ratio(_DOUBT)
            values: list[float] = []
            for node, parent in enumerate(tree.parents):
                above = 1.0 if parent == ROOT else told[parent]
                values.append(min(_CERTAIN, trust * told[node] / above) if above > 0 else 0.0)
            return values
        siblings: dict[int, int] = {}
        values = []
        for depth, parent in zip(tree.depths(), tree.parents, strict=True):
            place = siblings[parent] = siblings.get(parent, -1) + 1
            values.append(min(_CERTAIN, self._rate(depth, place)))
        return values

    def _rate(self, depth: int, place: int) -> float:
        tally = self.rates[_cell(depth, place)]
        return tally.hits / tally.expected


def chances(tree: TokenTree, conditionals: Sequence[float], record: Record) -> list[float]:
    """Each node's chance that the committed text passes through it, as its sequence showed; at most its parent's."""
    own = record.tally.ratio(_OWN_DOUBT)
    values: list[float] = []
    for node, parent in enumerate(tree.parents):
        value = min(_CERTAIN, own * conditionals[node])
        values.append(value if parent == ROOT else value * values[parent])
    return values


def learn_tree(
    experience: Experience, record: Record, tree: TokenTree, values: Sequence[float], asked: int
) -> tuple[Experience, Record]:
    """A tree came, of `asked` nodes at most; `values` are its chances."""
    order = sorted(range(len(tree)), key=values.__getitem__, reverse=True)
    depths = tree.depths()
    best, deep = [values[node] for node in order], [depths[node] for node in order]
    return (
        replace(experience, curve=experience.curve.learned(best, deep, asked, 32.0)),
        replace(record, curve=record.curve.learned(best, deep, asked, 8.0)),
    )


def learn_verdict(
    experience: Experience,
    record: Record,
    tree: TokenTree,
    conditionals: Sequence[float],
    decided: Sequence[int],
    *,
    is_told: bool,
) -> tuple[Experience, Record]:
    """The target has decided `decided` where `tree` was guessed. `is_told`: its chances are the drafter's own."""
    rates = list(experience.rates) if not is_told else []
    trust, recent, tally = experience.trust, experience.recent, record.tally
    for children, hit, depth in _points(tree, decided):
        expected = min(_CERTAIN, sum(conditionals[child] for child in children))
        tally = tally.learned(float(hit is not None), expected, 24.0)
        recent = recent.learned(float(hit is not None), expected, 24.0)
        if is_told:
            trust = trust.learned(float(hit is not None), expected / experience.trust.ratio(_DOUBT), 100.0)
            continue
        for place, child in enumerate(children):
            cell = _cell(depth, place)
            rates[cell] = rates[cell].learned(float(child == hit), 1.0, 64.0)
    if is_told:
        return replace(experience, trust=trust, recent=recent), replace(record, tally=tally)
    return replace(experience, rates=tuple(rates), recent=recent), replace(record, tally=tally)


def _points(tree: TokenTree, decided: Sequence[int]) -> Iterator[tuple[list[int], int | None, int]]:
    """The points of the committed path: the guesses below each, the one that was right if any, and their depth."""
    below: dict[int, list[int]] = {}
    for child, parent in enumerate(tree.parents):
        below.setdefault(parent, []).append(child)
    place: int | None = ROOT
    for depth, token in enumerate(decided, start=1):
        children = below.get(place) if place is not None else None
        if not children:
            return
        place = next((child for child in children if tree.tokens[child] == token), None)
        yield children, place, depth


def _cell(depth: int, place: int) -> int:
    return (min(depth, _DEEPEST) - 1) * _WIDEST + min(place, _WIDEST - 1)
