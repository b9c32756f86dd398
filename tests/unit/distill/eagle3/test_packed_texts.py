"""Texts of an EAGLE-3 training that share rows have the losses of texts in rows of their own."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from deploy.distillation import eagle3
from deploy.distillation.single_process_job import head_words
from tests.support.models.computed_states import computed_target
from tests.unit.distill.eagle3.test_eagle3_training import DEPTHS, DRAFTED, TAPS, random_head, shape
from workers.distill.answers import Answer
from workers.distill.eagle3.states import TextBatch, TextStates
from workers.distill.eagle3.training import RollOutPlan, RollOutTraining
from workers.distill.options import DistillOptions

LENGTHS = (14, 3, 9, 6, 12, 5)
"""Tokens of answers. One is too short for a roll-out of all depths."""


@pytest.fixture(scope="module")
def texts(target: PreTrainedModel, answers: tuple[Answer, ...]) -> TextStates:
    some = [replace(one, answer=one.answer[:count]) for one, count in zip(answers, LENGTHS, strict=False)]
    return TextStates(computed_target(target, TAPS), some, max_length=64, batch_tokens=64)


def training(target: Any, **changes: Any) -> RollOutTraining:
    plan = RollOutPlan(steps=1, depths=DEPTHS, is_bfloat16=False, **changes)
    return RollOutTraining(target, random_head(shape()), torch.tensor(DRAFTED), plan)


def gradients(of: RollOutTraining, texts: TextStates, batch: TextBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a batch, and the gradients of all parameters."""
    of._module.zero_grad()
    loss, _ = of._losses(texts, batch)
    loss.backward()
    return loss.detach(), torch.cat([one.grad.flatten() for one in of._module.parameters() if one.grad is not None])


@pytest.mark.parametrize("rows", [[[0, 1, 2], [3, 4, 5]], [[4, 3, 1, 5], [2, 0]], [[0], [1], [2], [3], [4], [5]]])
def test_a_batch_has_the_loss_and_the_gradients_of_texts_in_rows_of_their_own(
    target: PreTrainedModel, texts: TextStates, rows: list[list[int]]
) -> None:
    found, wanted = training(target), training(target)
    packed, alone = texts.packed(rows, 64), texts.batch(range(6))
    assert packed.tokens.shape == (len(rows), 64) and packed.lengths.sum() == alone.lengths.sum()
    for part, other in zip(gradients(found, texts, packed), gradients(wanted, texts, alone), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-3, atol=1e-5)


def test_as_if_a_row_were_one_text_the_loss_is_another_one(target: PreTrainedModel, texts: TextStates) -> None:
    packed = texts.packed([[0, 1, 2], [3, 4, 5]], 64)
    assert packed.packed is not None
    whole = replace(packed.packed, places=torch.arange(64).expand(2, -1))
    of = training(target)
    drafted = [of._drafted(packed, depth) for depth in range(DEPTHS)]
    loss, _ = gradients(of, texts, packed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(of, "_drafted", lambda _, depth: drafted[depth])
        other, _ = gradients(of, texts, replace(packed, packed=whole))
    assert abs(loss - other) > 1e-3


@pytest.mark.parametrize("parts", [1, 2])
def test_an_epoch_has_each_text_once_in_rows_of_the_longest_one(
    target: PreTrainedModel, texts: TextStates, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    drawn: list[tuple[list[list[int]], int]] = []
    plain = TextStates.packed

    def recorded(self: TextStates, rows: list[list[int]], length: int) -> TextBatch:
        drawn.append((rows, length))
        return plain(self, rows, length)

    monkeypatch.setattr(TextStates, "packed", recorded)
    longest = max(texts.lengths)
    of = training(target, packs=True, batch_tokens=2 * longest, parts=parts)
    epochs = [epoch for epoch, _ in islice(of._batches(texts), 12)]
    first = [rows for (rows, _), epoch in zip(drawn, epochs, strict=True) if epoch == 0]
    seen = Counter(text for rows in first for row in rows for text in row)
    assert max(seen.values()) == 1 and (parts > 1 or len(seen) == len(LENGTHS))
    assert any(len(row) > 1 for rows in first for row in rows)
    for rows, length in drawn:
        assert length == longest and len(rows) <= 2
        assert all(sum(texts.lengths[text] for text in row) <= length for row in rows)


@pytest.mark.parametrize("packs", [False, True])
def test_a_step_reads_nothing_back_from_the_device(
    target: Any, texts: TextStates, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the device `meta` cannot be read. A step that waits for a GPU would take many times as long."""
    batch = texts.packed([[0, 1, 2], [3, 4, 5]], 64) if packs else texts.batch(range(6))
    there = {name: getattr(batch, name).to("meta") for name in ("tokens", "taps", "final")}
    plan = RollOutPlan(steps=1, depths=DEPTHS, is_bfloat16=False)
    head, vocabulary = random_head(shape()).to("meta"), torch.tensor(DRAFTED, device="meta")
    of = RollOutTraining(deepcopy(target).to("meta"), head, vocabulary, plan)

    monkeypatch.setattr(of, "_autocast", nullcontext)  # there is none for this device

    loss = of._step(texts, replace(batch, **there), of.optimizers)

    assert loss.is_meta and len(of.optimizers[0].state) == len(list(head.parameters()))
    with pytest.raises(RuntimeError):
        float(loss)


def test_the_command_packs_where_it_is_asked_to() -> None:
    words = ["--target", "x", "--prompts", "y", "--out", "z"]
    for pack in (False, True):
        given = DistillOptions(plan=True, kind="eagle3", pack=pack)
        assert eagle3.options([*words, *head_words(given)]).pack is pack
