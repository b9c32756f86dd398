"""The method `suffix`: drafts from the request's own text and from outputs of requests with the same salt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.draft.lookup.lookup_drafter import LookupDrafter
from workers.draft.suffix import SuffixSession, SuffixSettings, create_suffix
from workers.serve.configuration import load_configuration

BUDGET = DraftBudget(8, 4)
GREEDY = SamplingParameters(temperature=0.0)


def drafter(**settings: int) -> LookupDrafter[SuffixSession]:
    draft = DraftSection(max_nodes=8, max_depth=4)
    return create_suffix(SuffixSettings(**settings), draft, TargetSection())


def first(
    tokens: Sequence[int],
    name: str = "a",
    salt: str = "",
    prompt_len: int = 1,
    sampling: SamplingParameters = GREEDY,
    budget: DraftBudget = BUDGET,
) -> DraftRow:
    start = SequenceStart(prompt_len, sampling, salt)
    return DraftRow(SequenceId(name), len(tokens), tuple(tokens), budget, start)


def proposal(method: LookupDrafter[SuffixSession], row: DraftRow) -> Proposal:
    found = method.propose([row])[0]
    assert found.fault is None
    return found


def finish(method: LookupDrafter[SuffixSession], *tokens: int, salt: str = "", prompt_len: int = 1) -> None:
    """Run a request to its end."""
    proposal(method, first(tokens, "earlier", salt, prompt_len))
    method.release([SequenceId("earlier")])


def test_tokens_that_followed_the_same_suffix_are_proposed() -> None:
    assert proposal(drafter(), first([1, 2, 3, 4, 5, 1, 2])).tree == TokenTree.chain((3, 4, 5, 1))


def test_a_repetition_continues_beyond_the_end_of_the_text() -> None:
    assert proposal(drafter(), first([9, 7, 8, 7, 8])).tree == TokenTree.chain((7, 8, 7, 8))


def test_what_followed_more_often_is_more_probable() -> None:
    found = proposal(drafter(), first([1, 2, 3, 0, 1, 2, 4, 5, 1, 2, 3, 6, 1, 2], budget=DraftBudget(2, 1)))
    assert found.tree.tokens == (3, 4)
    assert found.probabilities[0] > found.probabilities[1]


def test_an_output_of_another_request_is_drafted_after_a_release() -> None:
    method = drafter()
    proposal(method, first([5, 1, 2, 3, 4], "other"))
    assert proposal(method, first([9, 1, 2])).tree == EMPTY_TREE
    method.release([SequenceId("other")])
    assert proposal(method, first([9, 1, 2], "b")).tree == TokenTree.chain((3, 4))


def test_outputs_of_another_salt_are_never_drafted() -> None:
    method = drafter()
    finish(method, 5, 1, 2, 3, 4, salt="one")
    assert proposal(method, first([9, 1, 2], salt="two")).tree == EMPTY_TREE
    assert proposal(method, first([9, 1, 2], "b", salt="one")).tree == TokenTree.chain((3, 4))


def test_the_prompt_of_another_request_is_not_stored_beyond_the_longest_match() -> None:
    method = drafter(max_match=2)
    finish(method, 1, 2, 3, 4, 5, 6, 7, prompt_len=5)
    assert proposal(method, first([1, 2], "b")).tree == EMPTY_TREE
    assert proposal(method, first([4, 5], "c")).tree == TokenTree.chain((6, 7))


def test_a_request_without_an_answer_leaves_nothing() -> None:
    method = drafter()
    finish(method, 1, 2, 3, 4, prompt_len=4)
    assert proposal(method, first([9, 1, 2])).tree == EMPTY_TREE


def test_replaced_tokens_are_not_drafted() -> None:
    method = drafter()
    proposal(method, first([1, 2, 3, 4, 1, 2]))
    row = DraftRow(SequenceId("a"), 6, (5, 6, 1, 2), BUDGET)
    assert proposal(method, row).tree == TokenTree.chain((5, 6, 1, 2))


def test_a_repeated_row_repeats_its_proposal() -> None:
    method = drafter()
    proposal(method, first([1, 2, 3, 4, 1, 2]))
    row = DraftRow(SequenceId("a"), 7, (3,), BUDGET)
    expected = proposal(method, row)
    proposal(method, first([1, 2, 9, 1, 2, 9, 1, 2], "b"))
    assert proposal(method, row) == expected


def test_rejected_tokens_become_less_probable() -> None:
    method = drafter()
    before = proposal(method, first([1, 2, 3, 1, 2], budget=DraftBudget(1, 1))).probabilities[0]
    tokens = [1, 2]
    for step in range(60):
        tokens += [100 + step, 1, 2]
        proposal(method, first(tokens, "b"))
        proposal(method, DraftRow(SequenceId("b"), len(tokens) + 1, (99,), BUDGET))
        tokens.append(99)
    assert proposal(method, first([1, 2, 3, 1, 2], "c", budget=DraftBudget(1, 1))).probabilities[0] < before


def test_the_shortest_match_is_at_most_the_longest() -> None:
    with pytest.raises(ConfigurationError, match=r"min_match \(5\) must be at most max_match \(4\)"):
        load_configuration({"draft": {"suffix": {"min_match": 5, "max_match": 4}}})


def test_the_source_of_an_encoder_is_searched_too() -> None:
    start = SequenceStart(1, GREEDY, source=(20, 21, 22, 23, 2))
    row = DraftRow(SequenceId("a"), 3, (0, 20, 21), BUDGET, start)
    assert proposal(drafter(), row).tree == TokenTree.chain((22, 23, 2))
    repeated = DraftRow(SequenceId("b"), 6, (0, 20, 21, 7, 20, 21), BUDGET, start)
    assert set(proposal(drafter(), repeated).tree.tokens) >= {7, 22}


def test_a_node_says_whether_it_comes_from_the_request_or_from_an_earlier_answer() -> None:
    method = drafter()
    finish(method, 1, 7, 8, 20, 21)
    earlier = proposal(method, first([9, 7, 8]))
    assert dict(zip(earlier.tree.tokens, earlier.origins, strict=True)) == dict.fromkeys((20, 21), DraftOrigin.EARLIER)
    both = proposal(method, first([7, 8, 30, 31, 7, 8], "b"))
    origins = dict(zip(both.tree.tokens, both.origins, strict=True))
    assert (origins[30], origins[20]) == (DraftOrigin.REQUEST, DraftOrigin.EARLIER)


def test_what_request_and_earlier_answer_both_have_comes_from_the_request() -> None:
    method = drafter()
    finish(method, 1, 7, 8, 20, 21)
    found = proposal(method, first([7, 8, 20, 9, 7, 8]))
    assert found.origins[found.tree.tokens.index(20)] is DraftOrigin.REQUEST
