"""Once the budget of thinking is spent, the tokens that end it are forced, one after another and exactly."""

from __future__ import annotations

import math

import pytest
import torch

from cluster.core.request import SamplingParameters, ThinkingBudget
from workers.sampling.context import DecisionContext, forced_end
from workers.sampling.decide import decide, merge_winners, shard_winners

PROMPT = (9, 8, 7, 3)
START, END = (4,), (5, 6)
INSIDE = ThinkingBudget(3, (), END)
BEFORE = ThinkingBudget(3, START, END)


@pytest.mark.parametrize(
    ("thinking", "answer", "forced"),
    [
        (INSIDE, (1, 1), None),
        (INSIDE, (1, 1, 1), 5),
        (INSIDE, (1, 1, 1, 5), 6),
        (INSIDE, (1, 1, 1, 5, 6), None),
        (INSIDE, (1, 1, 5), 6),  # the model has begun to end it
        (INSIDE, (1, 5, 6), None),
        (INSIDE, (5, 1, 5, 6, 1, 1, 1, 1), None),
        (INSIDE, (5, 1, 5, 1), 5),
        (ThinkingBudget(0, (), END), (), 5),
        (ThinkingBudget(0, (), END), (5,), 6),
        (BEFORE, (1, 1, 1, 1, 1), None),  # it does not think
        (BEFORE, (4, 1, 1), None),
        (BEFORE, (4, 1, 1, 1), 5),
        (BEFORE, (2, 4, 1, 1, 1), 5),
        (BEFORE, (1, 1, 1, 1, 1, 4, 1, 1, 1, 1), None),  # what comes later is not thinking
        (BEFORE, (4, 5, 6, 4, 1, 1, 1, 1), None),
        (ThinkingBudget(1), (1, 1), None),
    ],
)
def test_the_forced_token_follows_from_the_answer(
    thinking: ThinkingBudget, answer: tuple[int, ...], forced: int | None
) -> None:
    assert forced_end(thinking, PROMPT + answer, len(PROMPT)) == forced


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(temperature=0.0, thinking=INSIDE),
        SamplingParameters(temperature=0.0, thinking=INSIDE, bad_words=((5,),), allowed_token_ids=(1, 2)),
        SamplingParameters(temperature=1.3, seed=3, thinking=INSIDE),
        SamplingParameters(temperature=0.7, seed=4, top_k=2, top_p=0.5, min_p=0.1, thinking=INSIDE),
    ],
)
def test_the_forced_token_is_chosen_whatever_the_model_and_other_parameters_say(sampling: SamplingParameters) -> None:
    contexts = [DecisionContext(sampling, PROMPT + answer, len(PROMPT)) for answer in ((1, 1), (1, 1, 1), (1, 1, 5))]
    logits = torch.zeros(3, 12)
    logits[:, 5:7] = -math.inf
    free, *forced = decide(logits, contexts)
    assert free not in (5, 6)
    assert forced == [5, 6]


def test_ranks_that_share_the_vocabulary_agree() -> None:
    sampling = SamplingParameters(temperature=0.9, seed=1, thinking=INSIDE)
    contexts = [DecisionContext(sampling, (*PROMPT, 1, 1, 1), len(PROMPT))]
    parts = [shard_winners(torch.zeros(1, 6), contexts, offset) for offset in (0, 6)]
    values, tokens = (torch.stack(column) for column in zip(*parts, strict=True))
    assert merge_winners(values, tokens).tolist() == [5]
