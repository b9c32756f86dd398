"""The method `prediction`: drafts from the client's prediction, realigned after each difference."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, DraftRow
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.fakes.counted_tokens import CountedTokens
from workers.draft.lookup.lookup_drafter import LookupDrafter
from workers.draft.prediction import PredictionSession, PredictionSettings, create_prediction
from workers.serve.configuration import load_configuration

NAME = SequenceId("a")
PROMPT = (900, 901, 902)
PREDICTION = tuple(range(10, 60))
BUDGET = DraftBudget(4, 4)


def drafter(**settings: int) -> LookupDrafter[PredictionSession]:
    draft = DraftSection(max_nodes=16, max_depth=8)
    return create_prediction(PredictionSettings(**settings), draft, TargetSection())


def follow(
    method: LookupDrafter[PredictionSession],
    answer: Sequence[int],
    prediction: Sequence[int] = PREDICTION,
    budget: DraftBudget = BUDGET,
) -> list[TokenTree]:
    """Send the answer token by token. Returns the trees drafted after each number of tokens, from 0."""
    start = SequenceStart(len(PROMPT), SamplingParameters(temperature=0.0), prediction=tuple(prediction))
    rows = [DraftRow(NAME, len(PROMPT), PROMPT, budget, start)]
    rows += [DraftRow(NAME, len(PROMPT) + index + 1, (token,), budget) for index, token in enumerate(answer)]
    return [method.propose([row])[0].tree for row in rows]


def test_the_answer_begins_as_predicted() -> None:
    assert follow(drafter(), [])[0] == TokenTree.chain((10, 11, 12, 13))


def test_an_answer_as_predicted_is_drafted_to_the_end() -> None:
    trees = follow(drafter(), PREDICTION)
    for index, tree in enumerate(trees):
        assert tree == TokenTree.chain(PREDICTION[index : index + 4])


@pytest.mark.parametrize(
    ("answer", "following"),
    [
        ([10, 11, 12, 500, 14], 15),  # replaced
        ([10, 11, 12, 500, 501, 502, 13], 14),  # inserted
        ([10, 11, 17], 18),  # removed
        ([500, 501, 13], 14),  # another beginning
    ],
)
def test_one_equal_token_near_the_expected_place_aligns_again(answer: list[int], following: int) -> None:
    assert follow(drafter(), answer)[-1].tokens[:4] == tuple(range(following, following + 4))


def test_right_after_a_difference_a_replaced_token_is_assumed_or_an_inserted_one() -> None:
    tree = follow(drafter(), [10, 11, 500], budget=DraftBudget(2, 1))[-1]
    assert sorted(tree.tokens) == [12, 13]


def test_the_place_of_a_difference_within_several_new_tokens_is_known() -> None:
    start = SequenceStart(len(PROMPT), SamplingParameters(temperature=0.0), prediction=PREDICTION)
    method = drafter()
    method.propose([DraftRow(NAME, len(PROMPT), PROMPT, BUDGET, start)])
    found = method.propose([DraftRow(NAME, len(PROMPT) + 4, (10, 11, 12, 500), DraftBudget(2, 1))])[0]
    assert sorted(found.tree.tokens) == [13, 14]


def test_right_after_a_difference_a_few_more_replaced_tokens_are_possible() -> None:
    tree = follow(drafter(), [10, 11, 500], budget=DraftBudget(8, 1))[-1]
    assert {12, 13, 14, 15} <= set(tree.tokens)


@pytest.mark.parametrize(
    ("answer", "following"),
    [
        ([1, 9, 2], (9, 3)),  # one token was replaced
        ([1, 9, 2, 9, 3], (9, 4)),  # twice
        ([1, 8, 9, 2], (8, 9)),  # by two
        ([1, 8, 9, 2, 8], (9, 3)),  # in the middle of the replacement
        ([1, 9, 2, 7, 3], (7, 4)),  # once only
    ],
)
def test_a_replacement_is_drafted_at_the_next_occurrence(answer: list[int], following: tuple[int, ...]) -> None:
    prediction = [1, 7, 2, 7, 3, 7, 4, 7, 5]
    tree = follow(drafter(), answer, prediction)[-1]
    assert tree.tokens[0] == following[0]
    assert (following[1], 0) in zip(tree.tokens, tree.parents, strict=True)


def test_an_answer_that_is_cut_is_aligned_from_its_start() -> None:
    method, start = drafter(), SequenceStart(1, SamplingParameters(temperature=0.0), prediction=PREDICTION)
    method.propose([DraftRow(NAME, 7, (900, *PREDICTION[:6]), BUDGET, start)])
    again = method.propose([DraftRow(NAME, 3, (900, *PREDICTION[:2]), BUDGET, start)])[0]
    assert again.tree == TokenTree.chain(PREDICTION[2:6])


def test_a_distant_place_needs_a_longer_match() -> None:
    method = drafter(window=4, min_match=3)
    assert follow(method, [10, 11, 12, 50])[-1].tokens[0] != 51
    assert follow(method, [10, 11, 12, 50, 51])[-1].tokens[0] != 52
    assert follow(method, [10, 11, 12, 50, 51, 52])[-1].tokens[0] == 53


def test_of_several_equal_places_the_nearest_to_the_expected_one_is_taken() -> None:
    prediction = [1, 7, 2, 7, 3, 7, 4, 7, 5]
    assert follow(drafter(candidates=1), [1, 9, 2, 7], prediction)[-1].tokens[:2] == (3, 7)
    assert follow(drafter(candidates=1), [1, 7, 2, 7, 3, 9, 4, 7], prediction)[-1].tokens[:1] == (5,)


def test_beyond_its_end_the_prediction_drafts_nothing() -> None:
    assert follow(drafter(), PREDICTION[:6], PREDICTION[:6])[-1] == EMPTY_TREE


def test_a_request_without_a_prediction_has_no_draft() -> None:
    assert follow(drafter(), [1, 2, 1, 2], ()) == [EMPTY_TREE] * 5


def test_text_of_the_prompt_does_not_align() -> None:
    start = SequenceStart(3, SamplingParameters(temperature=0.0), prediction=PREDICTION)
    row = DraftRow(NAME, 3, (20, 21, 22), DraftBudget(4, 4), start)
    assert drafter().propose([row])[0].tree == TokenTree.chain((10, 11, 12, 13))


def test_probabilities_grow_with_the_number_of_tokens_that_were_as_predicted() -> None:
    method = drafter()
    start = SequenceStart(1, SamplingParameters(temperature=0.0), prediction=PREDICTION)
    budget = DraftBudget(1, 1)
    after_one = method.propose([DraftRow(NAME, 2, (900, 10), budget, start)])[0].probabilities[0]
    after_six = method.propose([DraftRow(SequenceId("b"), 7, (900, *PREDICTION[:6]), budget, start)])[0]
    assert after_one < after_six.probabilities[0]


def test_the_shortest_match_is_at_most_the_longest() -> None:
    with pytest.raises(ConfigurationError, match=r"min_match \(5\) must be at most max_match \(4\)"):
        load_configuration({"draft": {"prediction": {"min_match": 5, "max_match": 4}}})


class CountedPrediction(tuple[int, ...]):
    """A prediction that counts how often it is compared as a whole."""

    compared = 0

    def __ne__(self, other: object) -> bool:
        CountedPrediction.compared += 1
        return super().__ne__(other)

    __hash__ = tuple.__hash__


@pytest.mark.parametrize("shift", [0, 1000], ids=["as predicted", "all different"])
def test_a_draft_reads_as_much_of_a_long_answer_as_of_a_short_one(shift: int) -> None:
    reads = []
    for length in (200, 5000):
        text = random.Random(0).choices(range(64), k=length)
        start = SequenceStart(1, SamplingParameters(), prediction=CountedPrediction(text))
        session = PredictionSession(start, PredictionSettings())
        session.replace(0, [0, *(token + shift for token in text[:-50])])
        session.drafts(8)  # it follows the whole answer, once
        session.tokens = CountedTokens(session.tokens)
        CountedPrediction.compared = 0
        session.drafts(8)
        reads.append(session.tokens.read)
    assert reads[0] == reads[1] < 50
    assert CountedPrediction.compared == 0
