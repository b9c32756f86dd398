"""Conversations that an EAGLE-3 training packs into rows of 8,192 tokens have the losses that each has alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models import tiny
from tests.support.models.computed_states import computed_target
from tests.unit.distill.eagle3.test_eagle3_training import DRAFTED, TAPS, random_head, shape
from workers.distill.answers import Answer
from workers.distill.device_training import State
from workers.distill.eagle3.states import TextStates
from workers.distill.eagle3.training import RollOutPlan, RollOutTraining
from workers.distill.target_model import load_target

LONGEST, PROMPT = 8192, 40
LENGTHS = (8192, 4000, 2500, 1600)
"""Tokens of texts: the first one fills a row, and the others share one."""


@pytest.fixture(scope="module")
def texts(target: PreTrainedModel) -> TextStates:
    drawn = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, tiny.VOCABULARY - 1, (length,), generator=drawn).tolist() for length in LENGTHS]
    answers = [
        Answer(f"long:{number}", "", 0.0, False, tuple(row[:PROMPT]), tuple(row[PROMPT:]))
        for number, row in enumerate(rows)
    ]
    return TextStates(computed_target(target, TAPS), answers, max_length=LONGEST, batch_tokens=LONGEST)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    config = tiny.llama(num_hidden_layers=6, tie_word_embeddings=True, max_position_embeddings=LONGEST)
    return load_target(tiny.save(tmp_path_factory.mktemp("long"), config), torch.device("cpu"))


def training(target: PreTrainedModel, depths: int) -> RollOutTraining:
    plan = RollOutPlan(steps=1, depths=depths, is_bfloat16=False, packs=True, batch_tokens=LONGEST, recomputes=True)
    of = shape()
    of = replace(of, body=replace(of.body, heads=1, kv_heads=1))  # attention takes a sixth of the memory
    return RollOutTraining(target, random_head(of), torch.tensor(DRAFTED), plan)


@pytest.mark.slow
def test_a_row_of_8192_tokens_has_the_losses_of_each_of_its_texts_alone(
    target: PreTrainedModel, texts: TextStates
) -> None:
    """No feature attends to another text, and positions begin again with each."""
    of, own = training(target, 2), (1, 2, 3)
    with torch.no_grad():
        packed, _ = of._losses(texts, texts.packed([own], LONGEST))
        alone = [(of._losses(texts, texts.batch([text]))[0], LENGTHS[text] - PROMPT - 1) for text in own]

    # Each depth has the mean over its positions, which are almost as many at all depths.
    wanted = sum(loss * count for loss, count in alone) / sum(count for _, count in alone)
    torch.testing.assert_close(packed, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_rows_of_8192_tokens_are_trained_on(target: PreTrainedModel, texts: TextStates) -> None:
    of, found = training(target, 1), list[State]()
    before = [value.detach().clone() for value in of.module.parameters()]

    of.run(texts, found.append, 0.0)

    assert [state.step for state in found] == [1] and math.isfinite(found[0].loss)
    assert all(not torch.equal(one, other) for one, other in zip(before, of.module.parameters(), strict=True))
