"""Several methods share one draft tree: the most probable nodes of all of them, by what the target has taken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftBudget, DraftRow, Proposal, RowFault, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftingTarget
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from workers.draft.common.combination import Combination, combined

ID = SequenceId("s")
START = SequenceStart(1, SamplingParameters(temperature=0.0))
BUDGET = DraftBudget(8, 4)


class FixedMethod:
    """Proposes the same tree for every row, or a fault."""

    def __init__(
        self,
        tree: TokenTree,
        probabilities: tuple[float, ...] = (),
        *,
        fault: RowFaultCode | None = None,
        is_prunable: bool = True,
        origin: DraftOrigin = DraftOrigin.REQUEST,
    ) -> None:
        self.origins = (origin,) * len(tree)
        self.tree, self.probabilities, self.fault, self.is_prunable = tree, probabilities, fault, is_prunable
        self.released: list[SequenceId] = []

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        fault = None if self.fault is None else RowFault(self.fault, "refused")
        tree = TokenTree() if fault else self.tree
        return tuple(
            Proposal(
                row.sequence_id,
                row.base_len,
                tree,
                fault,
                self.probabilities,
                is_prunable=self.is_prunable,
                origins=() if fault else self.origins,
            )
            for row in rows
        )

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self.released += sequence_ids


def row(base_len: int, new_tokens: tuple[int, ...], budget: DraftBudget = BUDGET) -> DraftRow:
    return DraftRow(ID, base_len, new_tokens, budget, START if len(new_tokens) == base_len else None)


def propose(method: Combination, base_len: int, *new_tokens: int, budget: DraftBudget = BUDGET) -> Proposal:
    (proposal,) = method.propose([row(base_len, new_tokens, budget)])
    return proposal


def test_the_union_of_all_trees_is_proposed_with_equal_prefixes_shared() -> None:
    method = Combination([FixedMethod(TokenTree.chain([1, 2, 3])), FixedMethod(TokenTree.chain([1, 2, 4]))])
    tree = propose(method, 1, 9).tree
    assert set(tree.candidates()) == {(1, 2, 3), (1, 2, 4)}
    assert len(tree) == 4


def test_a_shared_node_has_the_first_origin_of_its_methods() -> None:
    trained = FixedMethod(TokenTree.chain([1, 2, 3]), origin=DraftOrigin.TRAINED)
    earlier = FixedMethod(TokenTree.chain([1, 2]), origin=DraftOrigin.EARLIER)
    request = FixedMethod(TokenTree.chain([1]))
    for methods in ([trained, earlier, request], [request, trained, earlier]):
        proposal = propose(Combination(methods), 1, 9)
        assert proposal.tree == TokenTree.chain([1, 2, 3])
        assert proposal.origins == (DraftOrigin.REQUEST, DraftOrigin.EARLIER, DraftOrigin.TRAINED)


def test_what_several_methods_propose_is_more_probable_than_what_one_does() -> None:
    method = Combination(
        [FixedMethod(TokenTree((1, 2), (-1, -1)), (0.4, 0.4)), FixedMethod(TokenTree.chain([2]), (0.4,))]
    )
    proposal = propose(method, 1, 9)
    assert proposal.tree.tokens == (2, 1)
    assert proposal.probabilities == pytest.approx((0.64 / 1.04, 0.4 / 1.04))


def test_a_budget_keeps_the_most_probable_nodes() -> None:
    method = Combination(
        [FixedMethod(TokenTree.chain([1, 2, 3]), (0.9, 0.8, 0.7)), FixedMethod(TokenTree.chain([5, 6]), (0.05, 0.04))]
    )
    assert propose(method, 1, 9, budget=DraftBudget(2, 4)).tree == TokenTree.chain([1, 2])
    assert propose(method, 1, 9, budget=DraftBudget(8, 1)).tree == TokenTree((1, 5), (-1, -1))
    assert propose(method, 1, 9, budget=DraftBudget(0, 0)).tree == TokenTree()


def test_a_method_whose_nodes_the_target_takes_comes_first_in_the_end() -> None:
    """Both claim the same probability, but the target always takes the token of the second one."""
    methods = [FixedMethod(TokenTree.chain([1]), (0.5,)), FixedMethod(TokenTree.chain([2]), (0.5,))]
    method = Combination(methods, clock=lambda: 0.0)  # no time passes, so no method is suspended
    propose(method, 1, 9)
    for base_len in range(2, 40):
        proposal = propose(method, base_len, 2)
    assert proposal.tree.tokens == (2, 1)
    first, second = proposal.probabilities
    assert first > 0.8
    assert second < 0.15


def test_probabilities_never_exceed_those_of_parents_and_siblings_sum_to_one_at_most() -> None:
    method = Combination(
        [
            FixedMethod(TokenTree((1, 2, 3), (-1, -1, 0)), (0.9, 0.9, 0.9)),
            FixedMethod(TokenTree((1, 7), (-1, 0))),
        ]
    )
    proposal = propose(method, 1, 9)
    sums: dict[int, float] = {}
    for node, parent in enumerate(proposal.tree.parents):
        sums[parent] = sums.get(parent, 0.0) + proposal.probabilities[node]
    for parent, total in sums.items():
        assert total <= (1.0 if parent == -1 else proposal.probabilities[parent]) + 1e-9


def test_a_tree_that_must_stay_whole_is_proposed_whole() -> None:
    window = FixedMethod(TokenTree.chain([4, 5, 6]), (0.01, 0.005, 0.001), is_prunable=False)
    method = Combination([FixedMethod(TokenTree.chain([1, 2]), (0.9, 0.9)), window])
    proposal = propose(method, 1, 9, budget=DraftBudget(4, 4))
    assert set(proposal.tree.candidates()) == {(4, 5, 6), (1,)}
    assert not proposal.is_prunable


@pytest.mark.parametrize("code", [RowFaultCode.INVALID, RowFaultCode.KV_EXHAUSTED])
def test_a_method_that_cannot_serve_a_sequence_is_left_out(code: RowFaultCode) -> None:
    method = Combination([FixedMethod(TokenTree.chain([1])), FixedMethod(TokenTree.chain([2]), fault=code)])
    assert propose(method, 1, 9).tree == TokenTree.chain([1])


def test_a_method_that_is_out_of_sync_is_sent_the_sequence_again() -> None:
    behind = FixedMethod(TokenTree(), fault=RowFaultCode.OUT_OF_SYNC)
    fault = propose(Combination([FixedMethod(TokenTree.chain([1])), behind]), 1, 9).fault
    assert fault is not None
    assert fault.code is RowFaultCode.OUT_OF_SYNC


def test_a_release_reaches_every_method() -> None:
    methods = [FixedMethod(TokenTree.chain([1])), FixedMethod(TokenTree.chain([2]))]
    Combination(methods).release([ID])
    assert [method.released for method in methods] == [[ID], [ID]]


def test_one_method_alone_is_itself() -> None:
    method = FixedMethod(TokenTree.chain([1]))
    assert combined([method]) is method


class FailingMethod(FixedMethod):
    """Always raises."""

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        raise RuntimeError("out of order")


class TargetMethod(FixedMethod):
    """A method that computes with the target."""

    def bind(self, target: DraftingTarget) -> None:
        """The target is not needed."""


def test_beside_a_method_on_all_ranks_another_that_raises_is_left_out() -> None:
    failing = FailingMethod(TokenTree())
    method = combined([failing, TargetMethod(TokenTree.chain([1]))])
    (proposal,) = method.propose([row(1, (9,))])
    assert proposal.tree == TokenTree.chain([1])
    assert failing.released == [ID]
