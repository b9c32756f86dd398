"""Several drafting methods that share one draft tree.

Every method proposes for the same rows. The union of their trees is one trie. The probability of a node is learned from
what the target decides, separately for each set of methods that propose it and for each bin of the probability that
they give it. The most probable nodes are the proposal.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.drafting import DraftRow, Proposal, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftingTarget, DraftMethod, DraftsByTarget
from cluster.core.tree import ROOT, TokenTree
from workers.draft.idle_work import IdleWork
from workers.draft.sessions import MOST_SESSIONS

logger = logging.getLogger(__name__)

_EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Edges between the bins of the probability that methods give to a node, on condition of its parent."""
_PRIOR_WEIGHT = 8.0
"""Weight of the methods' own estimate, in observations."""
_DECAY = 0.998
"""Factor by which each observation reduces the weight of earlier ones."""
_FIRST_PRIOR, _LATER_PRIOR = 0.5, 0.1
"""Estimates for a first child and for its siblings, where a method sends no probabilities."""

_Key = tuple[int, int]
"""The set of methods that propose a node, one bit each, and the bin of its estimate."""


class _Rates:
    """How often the target takes nodes of each key."""

    def __init__(self) -> None:
        self._hits: dict[_Key, float] = {}
        self._trials: dict[_Key, float] = {}

    def probability(self, key: _Key, estimate: float) -> float:
        """The learned probability; `estimate` holds until there are observations."""
        hits, trials = self._hits.get(key, 0.0), self._trials.get(key, 0.0)
        return (_PRIOR_WEIGHT * estimate + hits) / (_PRIOR_WEIGHT + trials)

    def observe(self, key: _Key, *, hit: bool) -> None:
        """Record whether the target took a node of this key."""
        self._hits[key] = self._hits.get(key, 0.0) * _DECAY + hit
        self._trials[key] = self._trials.get(key, 0.0) * _DECAY + 1.0


@dataclass(slots=True, eq=False)
class _Node:
    """A node of the union."""

    children: dict[int, _Node] = field(default_factory=dict)
    estimates: dict[int, float] = field(default_factory=dict)
    """Probability on condition of the parent, by number of the method."""
    is_required: bool = False
    key: _Key = (0, 0)
    probability: float = 1.0
    """Probability of the path from the root."""

    def key_and_estimate(self) -> tuple[_Key, float]:
        """The key, and the methods' common estimate: the probability that not all of them are wrong."""
        wrong = 1.0
        methods = 0
        for method, estimate in self.estimates.items():
            wrong *= 1.0 - estimate
            methods |= 1 << method
        estimate = 1.0 - wrong
        return (methods, sum(estimate > edge for edge in _EDGES)), estimate


@dataclass(frozen=True, slots=True)
class _Proposed:
    """The union that the last proposal of a sequence was chosen from."""

    base_len: int
    root: _Node


class Combination:
    """Proposes the most probable nodes of all methods' trees. It is a `DraftMethod` with `IdleWork`."""

    def __init__(self, methods: Sequence[DraftMethod]) -> None:
        self._methods = tuple(methods)
        self._idle = tuple(method for method in methods if isinstance(method, IdleWork))
        self._rates = _Rates()
        self._proposed: OrderedDict[SequenceId, _Proposed] = OrderedDict()

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """See `DraftMethod`. A method that cannot serve a sequence is left out for it."""
        for row in rows:
            self._learn(row)
        answers = [self._ask(method, rows) for method in self._methods]
        return tuple(self._merged(row, [answer[index] for answer in answers]) for index, row in enumerate(rows))

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """See `DraftMethod`."""
        for sequence_id in sequence_ids:
            self._proposed.pop(sequence_id, None)
        for method in self._methods:
            method.release(sequence_ids)

    def catch_up(self, sequence_ids: Sequence[SequenceId]) -> bool:
        """See `IdleWork`."""
        return any(method.catch_up(sequence_ids) for method in self._idle)

    def run_ahead(self) -> bool:
        """See `IdleWork`."""
        return any(method.run_ahead() for method in self._idle)

    def _ask(self, method: DraftMethod, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        return method.propose(rows)

    def _learn(self, row: DraftRow) -> None:
        """Compare the last proposal of the sequence with the tokens that the target has decided since."""
        last = self._proposed.get(row.sequence_id)
        if last is None or row.known_len != last.base_len or not row.new_tokens:
            return
        del self._proposed[row.sequence_id]
        node: _Node | None = last.root
        for token in row.new_tokens:
            if node is None or not node.children:
                return
            for drafted, child in node.children.items():
                self._rates.observe(child.key, hit=drafted == token)
            node = node.children.get(token)

    def _merged(self, row: DraftRow, proposals: Sequence[Proposal]) -> Proposal:
        """The most probable nodes of all trees. A fault only if no method can serve the row."""
        faults = [proposal.fault for proposal in proposals if proposal.fault is not None]
        behind = next((fault for fault in faults if fault.code is RowFaultCode.OUT_OF_SYNC), None)
        fault = behind or (faults[0] if len(faults) == len(proposals) else None)
        if fault is not None:
            return Proposal(row.sequence_id, row.base_len, fault=fault)
        root = _Node()
        for method, proposal in enumerate(proposals):
            _add(root, method, proposal)
        if not root.children:
            return Proposal(row.sequence_id, row.base_len)
        self._estimate(root)
        self._proposed[row.sequence_id] = _Proposed(row.base_len, root)
        if len(self._proposed) > MOST_SESSIONS:
            self._proposed.popitem(last=False)
        tree, probabilities = _choose(root, row.budget.max_nodes, row.budget.max_depth)
        return Proposal(
            row.sequence_id,
            row.base_len,
            tree,
            probabilities=probabilities,
            ready=min(len(tree), sum(proposal.ready for proposal in proposals)),
            is_prunable=all(proposal.is_prunable for proposal in proposals),
        )

    def _estimate(self, root: _Node) -> None:
        """Set the key and the path probability of every node below `root`."""
        stack = [root]
        while stack:
            node = stack.pop()
            found: dict[int, float] = {}
            for token, child in node.children.items():
                child.key, estimate = child.key_and_estimate()
                found[token] = self._rates.probability(child.key, estimate)
            scale = node.probability / max(1.0, sum(found.values()))
            for token, child in node.children.items():
                child.probability = found[token] * scale
                stack.append(child)


def _add(root: _Node, method: int, proposal: Proposal) -> None:
    """Add the tree of one method to the union."""
    tree, probabilities = proposal.tree, proposal.probabilities
    nodes: list[_Node] = []
    has_child: set[int] = set()
    for index, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        above = root if parent == ROOT else nodes[parent]
        node = above.children.setdefault(token, _Node())
        nodes.append(node)
        if probabilities:
            whole = 1.0 if parent == ROOT else probabilities[parent]
            estimate = probabilities[index] / whole if whole > 0.0 else 0.0
        else:
            estimate = _LATER_PRIOR if parent in has_child else _FIRST_PRIOR
        has_child.add(parent)
        node.estimates[method] = min(0.999, estimate)
        node.is_required |= not proposal.is_prunable


def _choose(root: _Node, max_nodes: int, max_depth: int) -> tuple[TokenTree, tuple[float, ...]]:
    """The required nodes and the most probable others, best first, within the budget. No child precedes its parent."""
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    frontier = [(child, token, ROOT, 1) for token, child in root.children.items()]
    while frontier and len(tokens) < max_nodes:
        best = max(frontier, key=lambda entry: (entry[0].is_required, entry[0].probability))
        frontier.remove(best)
        node, token, parent, depth = best
        if depth > max_depth:
            continue
        tokens.append(token)
        parents.append(parent)
        probabilities.append(node.probability)
        index = len(tokens) - 1
        frontier.extend((child, below, index, depth + 1) for below, child in node.children.items())
    return TokenTree(tuple(tokens), tuple(parents)), tuple(probabilities)


class TargetCombination(Combination):
    """A combination with methods that draft by the target. It is a `DraftsByTarget`, too.

    Those methods compute on all ranks, so their exceptions are raised. Another method that raises is left out.
    """

    def _ask(self, method: DraftMethod, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        try:
            return super()._ask(method, rows)
        except Exception:
            if isinstance(method, DraftsByTarget):
                raise
            logger.exception("a drafting method failed: the next step goes without its drafts")
            method.release([row.sequence_id for row in rows])
            return tuple(Proposal(row.sequence_id, row.base_len) for row in rows)

    def bind(self, target: DraftingTarget) -> None:
        """See `DraftsByTarget`."""
        for method in self._methods:
            if isinstance(method, DraftsByTarget):
                method.bind(target)


def combined(methods: Sequence[DraftMethod]) -> DraftMethod:
    """One method out of several, or the only one."""
    if len(methods) == 1:
        return methods[0]
    has_target = any(isinstance(method, DraftsByTarget) for method in methods)
    return TargetCombination(methods) if has_target else Combination(methods)
