"""How much of a prediction is in an answer."""

from __future__ import annotations

import random

import pytest

from cluster.generation.text.output_processor import PredictionMatch


def counts(prediction: list[int], answer: list[int], step: int = 1) -> tuple[int, int]:
    match = PredictionMatch(prediction)
    for first in range(0, len(answer), step):
        match.add(answer[first : first + step])
    return match.accepted, match.rejected


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], (3, 0)),
        ([1, 2, 3], [1, 2], (2, 1)),
        ([1, 2, 3], [], (0, 3)),
        ([], [1, 2], (0, 0)),
        ([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6], (5, 1)),  # one token replaced
        ([1, 2, 3, 4, 5, 6], [1, 2, 4, 5, 6], (5, 1)),  # one removed
        ([1, 2, 3, 4], [1, 8, 9, 2, 3, 4], (4, 0)),  # two added
        ([1, 2, 1, 2, 3], [1, 2, 3], (3, 2)),
        ([5, 6], [6, 5], (1, 1)),  # only in order
    ],
)
def test_tokens_of_the_prediction_count_in_their_order(
    prediction: list[int], answer: list[int], expected: tuple[int, int]
) -> None:
    assert counts(prediction, answer) == expected


def test_the_count_does_not_depend_on_how_the_answer_arrives_and_never_exceeds_either() -> None:
    rng = random.Random(3)
    for _ in range(200):
        prediction = [rng.randrange(6) for _ in range(rng.randrange(30))]
        answer = [rng.randrange(6) for _ in range(rng.randrange(30))]
        accepted, rejected = counts(prediction, answer)
        assert counts(prediction, answer, 7) == (accepted, rejected)
        assert 0 <= accepted <= min(len(prediction), len(answer))
        assert accepted + rejected == len(prediction)
