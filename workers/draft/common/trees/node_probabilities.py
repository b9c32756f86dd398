"""Estimates the probabilities of a node's children, and adds the target's decisions to the calibration."""

from __future__ import annotations

from workers.draft.common.trees.calibration import KINDS, Calibration, Kind
from workers.draft.common.trees.draft_node import DraftNode
from workers.draft.common.trees.lookup_acceptance import Agreement


def estimate_children(node: DraftNode, calibration: Calibration, is_greedy: bool) -> None:
    """Set the probabilities of the children. The candidates share what the looked-up tokens leave."""
    candidates = [child for child in node.children if child.rank is not None]
    estimates = calibration.probabilities([child.confidence for child in candidates], _kind(node, is_greedy))
    for child, probability in zip(candidates, estimates, strict=True):
        child.probability = probability
    for child in node.children:
        if child.match_length:
            _apply_lookup(node, child, calibration, is_greedy)
    for child in node.children:
        child.path_probability = node.path_probability * child.probability


def observe_decision(node: DraftNode, taken: DraftNode | None, calibration: Calibration, is_greedy: bool) -> None:
    """Record which child the target took below `node`; `None` means none of them."""
    candidates = [child for child in node.children if child.rank is not None]
    if candidates:
        index = candidates.index(taken) if taken in candidates else None
        calibration.observe([child.confidence for child in candidates], index, _kind(node, is_greedy))
    for child in node.children:
        if child.match_length:
            agreement = _agreement(node, child)
            calibration.lookups.observe(child.match_length, agreement, is_greedy, hit=child is taken)


def _apply_lookup(node: DraftNode, child: DraftNode, calibration: Calibration, is_greedy: bool) -> None:
    """Set the probability of a looked-up child and scale its siblings' so that the sum stays at most 1."""
    before = child.probability if child.rank is not None else 0.0
    child.probability = calibration.lookups.probability(child.match_length, _agreement(node, child), is_greedy)
    left = (1.0 - child.probability) / max(1.0 - before, 1e-6)
    for sibling in node.children:
        if sibling is not child:
            sibling.probability *= min(1.0, left) if before < 1.0 else 0.0


def _kind(node: DraftNode, is_greedy: bool) -> Kind:
    """The kind of the candidates below `node`."""
    return KINDS[is_greedy, node.rank == 0]


def _agreement(node: DraftNode, child: DraftNode) -> Agreement:
    """The agreement of the model's candidates below `node` with a looked-up child."""
    if node.table is None:
        return Agreement.UNKNOWN
    if child.rank is None:
        return Agreement.ABSENT
    return Agreement.FIRST if child.rank == 0 else Agreement.LATER
