"""An acceptance model: the probability that drafted tokens are accepted, per sequence and over all sequences.

A *position* on the committed path that had drafted tokens below it is a hit when the target decided on one of them.
Estimates use the history of the sequence. Where that is too short, they use the history of all sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cluster.core.drafting import DraftBudget
from cluster.core.tree import ROOT, TokenTree
from cluster.speculation.constants import (
    CALIBRATION_MEMORY,
    CURVE_MEMORY,
    HIT_MEMORY,
    MAX_ACCEPTANCE,
    PRIOR_FALL,
    PRIOR_POSITIONS,
    PRIOR_POSITIONS_SEQUENCE,
    RATE_DEPTHS,
    RATE_MEMORY,
    RATE_SIBLINGS,
    SEQUENCE_CURVE_MEMORY,
    UNSEEN_DECAY,
    UNSEEN_TREES,
)


@dataclass(frozen=True, slots=True)
class HitRate:
    """Sums of observed and expected hits. Older observations count less."""

    hits: float = 0.0
    expected: float = 0.0

    def observed(self, hit: float, expected: float, memory: float) -> HitRate:
        """The rate with one more observation; about `memory` observations count."""
        decay = 1 - 1 / memory
        return HitRate(self.hits * decay + hit, self.expected * decay + expected)

    def ratio(self, prior: float) -> float:
        """Observed ÷ expected hits, starting from `prior` positions at which the two are equal."""
        return (self.hits + prior) / (self.expected + prior)


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Mean acceptance probability of the nodes of a tree by rank, best first. A missing node counts as 0."""

    probabilities: tuple[float, ...] = ()
    """Mean acceptance probability by rank."""
    depths: tuple[float, ...] = ()
    """Mean depth that the first nodes reach, up to each rank."""
    weights: tuple[float, ...] = ()
    """Number of trees that each rank was learned from."""

    def observed(
        self, probabilities: Sequence[float], depths: Sequence[int], asked: int, memory: float
    ) -> AcceptanceCurve:
        """The curve with one more tree, which could have up to `asked` nodes.

        `probabilities` and `depths` are those of the tree's nodes, best first. Ranks beyond `asked` were not observed.
        """
        mean, reached, weights = list(self.probabilities), list(self.depths), list(self.weights)
        deepest = 0
        for rank in range(asked):
            if rank == len(mean):
                mean.append(0.0)
                reached.append(float(rank + 1))
                weights.append(0.0)
            weight = weights[rank] = min(weights[rank] + 1, memory)
            probability = probabilities[rank] if rank < len(probabilities) else 0.0
            mean[rank] += (probability - mean[rank]) / weight
            if rank < len(depths):
                deepest = max(deepest, depths[rank])
                reached[rank] += (deepest - reached[rank]) / weight
        weights[asked:] = [weight * UNSEEN_DECAY for weight in weights[asked:]]
        return AcceptanceCurve(tuple(mean), tuple(reached), tuple(weights))

    def combined(self, others: AcceptanceCurve, prior: float, count: int) -> tuple[float, ...]:
        """Expected probabilities of the best `count` nodes, never rising.

        After `prior` trees, this curve counts as much as `others`. Ranks that neither curve has observed are
        extrapolated from the decrease over the ranks before.
        """
        expected: list[float] = []
        before = latest = 1.0
        for rank in range(count):
            value = latest * (latest / before if rank > 1 and before > 0 else PRIOR_FALL)
            for curve, doubt in ((others, UNSEEN_TREES), (self, prior)):
                if rank < len(curve.probabilities):
                    weight = curve.weights[rank]
                    value += weight / (weight + doubt) * (curve.probabilities[rank] - value)
            before, latest = latest, min(latest, value)
            expected.append(latest)
        return tuple(expected)

    def depth_of(self, count: int) -> int:
        """Expected depth of a tree with a drafter's best `count` nodes, in tokens."""
        if not count:
            return 0
        if count <= len(self.depths):
            return max(1, round(self.depths[count - 1]))
        return count if not self.depths else max(1, round(self.depths[-1])) + count - len(self.depths)

    def nodes_within(self, budget: DraftBudget) -> int:
        """Number of best nodes that a tree of this budget can contain. Deeper nodes may not fit."""
        if budget.max_depth >= max(self.depth_of(budget.max_nodes), 1):
            return budget.max_nodes
        return sum(self.depth_of(count) <= budget.max_depth for count in range(1, budget.max_nodes + 1))


@dataclass(frozen=True, slots=True)
class SequenceAcceptance:
    """Observations of one sequence."""

    curve: AcceptanceCurve = field(default_factory=AcceptanceCurve)
    hits: HitRate = field(default_factory=HitRate)
    """Hits of the sequence, and the hits that the model of all sequences expected."""


def _first_rates() -> tuple[HitRate, ...]:
    """Return the rates before any observation: 0.6 for the first of the siblings, much less for later ones."""
    likely = (0.6, 0.15, 0.08, 0.05)
    return tuple(HitRate(2 * likely[sibling], 2.0) for _ in range(RATE_DEPTHS) for sibling in range(RATE_SIBLINGS))


@dataclass(frozen=True, slots=True)
class AcceptanceModel:
    """Observations of all sequences."""

    rates: tuple[HitRate, ...] = field(default_factory=_first_rates)
    """Acceptance by depth and by position among siblings, for drafters that send no probabilities."""
    calibration: HitRate = field(default_factory=HitRate)
    """Hits, and the hits expected from the probabilities that drafters sent."""
    curve: AcceptanceCurve = field(default_factory=AcceptanceCurve)
    recent: HitRate = field(default_factory=HitRate)
    """Hits at the latest positions. This rate shows a change first."""

    @property
    def recent_ratio(self) -> float:
        """Observed ÷ expected hits at the latest positions, at most 1."""
        return min(1.0, self.recent.ratio(PRIOR_POSITIONS_SEQUENCE))

    def conditionals(self, tree: TokenTree, probabilities: Sequence[float]) -> list[float]:
        """Each node's acceptance probability on condition that its parent is accepted, from all sequences.

        `probabilities` are the drafter's own estimates, or empty.
        """
        if probabilities:
            calibration = self.calibration.ratio(PRIOR_POSITIONS)
            values: list[float] = []
            for node, parent in enumerate(tree.parents):
                above = 1.0 if parent == ROOT else probabilities[parent]
                values.append(min(MAX_ACCEPTANCE, calibration * probabilities[node] / above) if above > 0 else 0.0)
            return values
        siblings: dict[int, int] = {}
        values = []
        for depth, parent in zip(tree.depths(), tree.parents, strict=True):
            sibling = siblings[parent] = siblings.get(parent, -1) + 1
            values.append(min(MAX_ACCEPTANCE, self._rate(depth, sibling)))
        return values

    def _rate(self, depth: int, sibling: int) -> float:
        rate = self.rates[_rate_index(depth, sibling)]
        return rate.hits / rate.expected


def path_probabilities(tree: TokenTree, conditionals: Sequence[float], sequence: SequenceAcceptance) -> list[float]:
    """Each node's probability of being accepted, with the sequence's own history; at most its parent's."""
    ratio = sequence.hits.ratio(PRIOR_POSITIONS_SEQUENCE)
    values: list[float] = []
    for node, parent in enumerate(tree.parents):
        value = min(MAX_ACCEPTANCE, ratio * conditionals[node])
        values.append(value if parent == ROOT else value * values[parent])
    return values


def observe_tree(
    model: AcceptanceModel, sequence: SequenceAcceptance, tree: TokenTree, probabilities: Sequence[float], asked: int
) -> tuple[AcceptanceModel, SequenceAcceptance]:
    """Learn from a proposed tree that could have up to `asked` nodes. `probabilities` has one value per node."""
    order = sorted(range(len(tree)), key=probabilities.__getitem__, reverse=True)
    depths = tree.depths()
    best, deep = [probabilities[node] for node in order], [depths[node] for node in order]
    return (
        replace(model, curve=model.curve.observed(best, deep, asked, CURVE_MEMORY)),
        replace(sequence, curve=sequence.curve.observed(best, deep, asked, SEQUENCE_CURVE_MEMORY)),
    )


def observe_verdict(
    model: AcceptanceModel,
    sequence: SequenceAcceptance,
    tree: TokenTree,
    conditionals: Sequence[float],
    decided: Sequence[int],
    *,
    has_probabilities: bool,
) -> tuple[AcceptanceModel, SequenceAcceptance]:
    """Learn from `decided`, the tokens that the target committed after the root of `tree`.

    `has_probabilities` says whether the conditionals come from the drafter's own estimates.
    """
    rates = list(model.rates) if not has_probabilities else []
    calibration, recent, hits = model.calibration, model.recent, sequence.hits
    for children, accepted, depth in _positions(tree, decided):
        hit = float(accepted is not None)
        expected = min(MAX_ACCEPTANCE, sum(conditionals[child] for child in children))
        hits = hits.observed(hit, expected, HIT_MEMORY)
        recent = recent.observed(hit, expected, HIT_MEMORY)
        if has_probabilities:
            uncalibrated = expected / model.calibration.ratio(PRIOR_POSITIONS)
            calibration = calibration.observed(hit, uncalibrated, CALIBRATION_MEMORY)
            continue
        for sibling, child in enumerate(children):
            index = _rate_index(depth, sibling)
            rates[index] = rates[index].observed(float(child == accepted), 1.0, RATE_MEMORY)
    if has_probabilities:
        return replace(model, calibration=calibration, recent=recent), replace(sequence, hits=hits)
    return replace(model, rates=tuple(rates), recent=recent), replace(sequence, hits=hits)


def _positions(tree: TokenTree, decided: Sequence[int]) -> Iterator[tuple[list[int], int | None, int]]:
    """Yield the drafted nodes, the accepted node or `None`, and the depth of each position with drafted tokens."""
    below: dict[int, list[int]] = {}
    for child, parent in enumerate(tree.parents):
        below.setdefault(parent, []).append(child)
    node: int | None = ROOT
    for depth, token in enumerate(decided, start=1):
        children = below.get(node) if node is not None else None
        if not children:
            return
        node = next((child for child in children if tree.tokens[child] == token), None)
        yield children, node, depth


def _rate_index(depth: int, sibling: int) -> int:
    return (min(depth, RATE_DEPTHS) - 1) * RATE_SIBLINGS + min(sibling, RATE_SIBLINGS - 1)
