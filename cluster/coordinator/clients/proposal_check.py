"""Checks a proposal against the row that asked for it, and keeps the part that may be verified."""

from __future__ import annotations

from dataclasses import replace

from cluster.core.drafting import DraftBudget, Proposal


def checked(proposal: Proposal, budget: DraftBudget, vocabulary_size: int) -> Proposal:
    """Return the proposal with at most the nodes of `budget`, or an empty one if its tree is unusable.

    A tree with a token outside the vocabulary is unusable, and so is one beyond the budget that must stay whole.
    """
    tree = proposal.tree
    nodes = tree.within(budget.max_nodes, budget.max_depth)
    is_whole = len(nodes) == len(tree)
    if (
        proposal.fault is not None
        or not all(0 <= token < vocabulary_size for token in tree.tokens)
        or not (is_whole or proposal.is_prunable)
    ):
        return Proposal(proposal.sequence_id, proposal.base_len)
    if proposal.probabilities and len(proposal.probabilities) != len(tree):
        proposal = replace(proposal, probabilities=())
    if proposal.distributions and len(proposal.distributions) != len(tree):
        proposal = replace(proposal, distributions=())
    return proposal.subset(nodes)
