"""Acceptance estimates: forecasts of trees before they are proposed, and learning once the target has decided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.core.drafting import Proposal
from cluster.core.ids import SequenceId
from cluster.core.sequence import DraftRequest
from cluster.core.tree import ROOT, TokenTree
from cluster.speculation.acceptance import (
    AcceptanceModel,
    SequenceAcceptance,
    observe_tree,
    observe_verdict,
    path_probabilities,
)
from cluster.speculation.constants import PRIOR_TREES
from cluster.speculation.goodput import DraftForecast


@dataclass(frozen=True, slots=True)
class EstimatedDraft:
    """A proposed tree with its acceptance probabilities."""

    request: DraftRequest
    """The request that the drafter answered."""
    proposal: Proposal
    conditionals: list[float]
    """Each node's acceptance probability on condition that its parent is accepted."""
    probabilities: list[float]
    """Each node's acceptance probability."""


class AcceptanceEstimator:
    """Estimates how probable it is that drafted tokens are accepted, and learns from verdicts."""

    def __init__(self) -> None:
        self._model = AcceptanceModel()
        self._sequences: dict[SequenceId, SequenceAcceptance] = {}
        self._undecided: list[EstimatedDraft] = []

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Drop the history of sequences that have ended."""
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def knows(self, sequence_id: SequenceId) -> bool:
        """Whether forecasts for a sequence depend on its own drafts at least as much as on those of all others."""
        sequence = self._sequences.get(sequence_id)
        return sequence is not None and sum(sequence.curve.weights[:1]) >= PRIOR_TREES

    def forecast(self, request: DraftRequest) -> DraftForecast:
        """Forecast the tree of up to `request.budget` that the drafter will propose for this sequence."""
        most = request.budget
        sequence = self._sequences.setdefault(request.sequence.id, SequenceAcceptance())
        recent = self._model.recent_ratio
        expected = sequence.curve.combined(self._model.curve, PRIOR_TREES, most.max_nodes)
        curve = sequence.curve if sum(sequence.curve.weights[:1]) > PRIOR_TREES else self._model.curve
        depths = [min(most.max_depth, curve.depth_of(count)) for count in range(1, most.max_nodes + 1)]
        return DraftForecast(tuple(recent * value for value in expected), tuple(_rising(depths)), most.max_depth)

    def estimate(self, request: DraftRequest, proposal: Proposal) -> EstimatedDraft:
        """The acceptance probabilities of a proposed tree."""
        conditionals = self._model.conditionals(proposal.tree, proposal.probabilities)
        sequence = self._sequences.get(request.sequence.id, SequenceAcceptance())
        probabilities = path_probabilities(proposal.tree, conditionals, sequence)
        if proposal.distributions:
            probabilities = _falling_by_rank(proposal.tree, probabilities)
        return EstimatedDraft(request, proposal, conditionals, probabilities)

    def expect_verdicts(self, drafts: Iterable[EstimatedDraft]) -> None:
        """Learn from these trees once the target has decided, whether they are verified or not."""
        self._undecided += drafts

    def learn(self) -> None:
        """Learn from the trees on which the target has decided since the last call."""
        undecided, self._undecided = self._undecided, []
        for draft in undecided:
            sequence = draft.request.sequence
            if sequence.id not in self._sequences:
                continue  # the sequence has ended
            decided = sequence.tokens[draft.proposal.base_len :]
            if _is_decided(draft, decided):
                self._learn(draft, decided)
            else:
                self._undecided.append(draft)

    def _learn(self, draft: EstimatedDraft, decided: Sequence[int]) -> None:
        sequence_id, tree = draft.request.sequence.id, draft.proposal.tree
        model, sequence = self._model, self._sequences[sequence_id]
        shown = model.curve.nodes_within(draft.request.budget)
        model, sequence = observe_tree(model, sequence, tree, draft.probabilities, shown)
        self._model, self._sequences[sequence_id] = observe_verdict(
            model,
            sequence,
            tree,
            draft.conditionals,
            decided,
            has_probabilities=bool(draft.proposal.probabilities),
        )


def _is_decided(draft: EstimatedDraft, decided: Sequence[int]) -> bool:
    """Whether the decided tokens leave the tree or pass its end, or the sequence is finished."""
    tree, node = draft.proposal.tree, ROOT
    for token in decided:
        child = tree.child(node, token)
        if child is None:
            return True
        node = child
    return draft.request.sequence.finish is not None or node not in (ROOT, *tree.parents)


def _rising(values: Sequence[int]) -> list[int]:
    rising: list[int] = []
    for value in values:
        rising.append(max(value, rising[-1]) if rising else value)
    return rising


def _falling_by_rank(tree: TokenTree, probabilities: Sequence[float]) -> list[float]:
    """The probabilities, at most those of the parent and of earlier siblings.

    Siblings that were drawn at random without replacement can only be left out from the last one on.
    """
    values: list[float] = []
    earlier: dict[int, float] = {}
    for node, parent in enumerate(tree.parents):
        above = 1.0 if parent == ROOT else values[parent]
        values.append(min(probabilities[node], above, earlier.get(parent, 1.0)))
        earlier[parent] = values[-1]
    return values
