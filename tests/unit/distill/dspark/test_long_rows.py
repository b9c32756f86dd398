"""Conversations that are packed into rows of 8,192 tokens have the losses that each has alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models import tiny
from tests.support.models.computed_states import computed_target
from tests.unit.distill.dspark.test_dspark_training import SLOTS, TAPS, head_of, random_module
from workers.distill.answers import Answer
from workers.distill.dspark.rows import TextRows
from workers.distill.dspark.training import Anchors, BlockPlan, BlockTraining
from workers.distill.target_model import load_target

LONGEST, PROMPT, BLOCKS = 8192, 40, 5
LENGTHS = (4000, 2500, 1600, 700, 300)
"""Tokens of texts: the first three fill a row but for 92 tokens, the others share the second one."""


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    drawn = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, tiny.VOCABULARY - 1, (length,), generator=drawn).tolist() for length in LENGTHS]
    return [
        Answer(f"long:{number}", "", 0.0, False, tuple(text[:PROMPT]), tuple(text[PROMPT:]))
        for number, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    config = tiny.llama(num_hidden_layers=6, tie_word_embeddings=True, max_position_embeddings=LONGEST)
    return load_target(tiny.save(tmp_path_factory.mktemp("long"), config), torch.device("cpu"))


def own_anchors(answer: Answer) -> list[int]:
    """Places of a text whose blocks have all of their tokens, the first and the last one among them."""
    last = len(answer.prompt) + len(answer.answer) - SLOTS - 1
    return [PROMPT + (last - PROMPT) * number // (BLOCKS - 1) for number in range(BLOCKS)]


def losses(training: BlockTraining, texts: TextRows, row: int, places: list[int]) -> Tensor:
    """The loss and the share of right tokens of some blocks of a row."""
    drawn = Anchors(torch.tensor([row]), torch.tensor([places]), torch.ones(1, len(places), dtype=torch.bool))
    with torch.no_grad():
        loss, reported = training._losses(texts, drawn)
    return torch.stack([loss, *reported])


@pytest.mark.slow
def test_texts_in_rows_of_8192_tokens_have_the_losses_of_each_alone(
    target: PreTrainedModel, answers: list[Answer]
) -> None:
    """No block attends to another text, and positions begin again with each."""
    packed = TextRows(computed_target(target, TAPS), answers, length=LONGEST)
    assert packed.rows == 2 and packed.tokens == sum(LENGTHS)
    module = random_module(target, packed)
    training = BlockTraining(head_of(target), module, BlockPlan(is_bfloat16=False, steps=1))

    found, wanted = [], []
    for row, numbers in ((0, (0, 1, 2)), (1, (3, 4))):
        places: list[int] = []
        begin = 0
        for number in numbers:
            answer = answers[number]
            assert packed.text(row, begin)[: LENGTHS[number]] == [*answer.prompt, *answer.answer]
            places += [begin + place for place in own_anchors(answer)]
            begin += LENGTHS[number]
            alone = TextRows(computed_target(target, TAPS), [answer], length=LENGTHS[number])
            wanted.append(losses(training, alone, 0, own_anchors(answer)))
        found.append(len(numbers) * losses(training, packed, row, places))

    torch.testing.assert_close(torch.stack(found).sum(0), torch.stack(wanted).sum(0), rtol=1e-4, atol=1e-4)
    packed._starts.zero_()  # as if a row were one text
    assert (len(numbers) * losses(training, packed, row, places) - found[-1]).abs()[0] > 1e-2
