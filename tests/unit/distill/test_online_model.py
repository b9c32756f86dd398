"""A short training of a draft model on served texts: what it changes, and which state of the layers it keeps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import distilled_draft, tiny
from workers.distill import online_model
from workers.distill.agreement import agreement, share
from workers.distill.answers import Answer
from workers.distill.online import OnlinePlan, ServedText
from workers.distill.online_model import ServedStudent, load_served_student, train_model_online

pytestmark = pytest.mark.slow

FIRST, OTHER = (5, 6, 7, 8, 9, 10, 11, 12), (5, 6, 7, 80, 70, 60, 50, 40)
"""Two texts with the same prompt of three tokens."""
PLAN = OnlinePlan(steps=30, measures=3, learning_rate=1e-2)


def text(tokens: tuple[int, ...]) -> ServedText:
    return ServedText(tokens, 4, 0, torch.empty(len(tokens) - 1, 0))


def parameters(student: ServedStudent) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in student.own_parameters().items()}


def embedding(student: ServedStudent) -> Tensor:
    ends: Any = student.module.get_input_embeddings()
    return Tensor(ends.weight.detach().clone())


def agreed(student: ServedStudent, tokens: tuple[int, ...]) -> float:
    answer = Answer("", "", 0.0, False, tokens[:3], tokens[3:])
    return share(agreement(student, [answer], 64, 64, autocast=False))


@pytest.fixture(params=["plain", "distilled"])
def student(request: pytest.FixtureRequest, tmp_path: Path) -> ServedStudent:
    target = tiny.save(tmp_path / "target", tiny.llama())
    if request.param == "plain":
        return load_served_student(target, target)
    vocabulary = sorted({*FIRST, *OTHER, *range(20, 40)})
    return load_served_student(distilled_draft.save(target, tmp_path / "draft", (1,), vocabulary), target)


def test_layers_alone_learn_and_the_state_is_kept_that_predicts_texts_best_that_were_left_out(
    student: ServedStudent,
) -> None:
    before, ends = parameters(student), embedding(student)
    assert agreed(student, FIRST) < 0.5
    learned = train_model_online(student, before, [text(FIRST)] * 12, [text(FIRST)] * 4, PLAN)
    assert agreed(student, FIRST) == 1.0
    assert learned.keys() == before.keys()
    assert all(not torch.equal(before[name], value) for name, value in learned.items())
    assert torch.equal(embedding(student), ends)
    kept = {name: value.clone() for name, value in learned.items()}
    again = train_model_online(student, kept, [text(OTHER)] * 12, [text(FIRST)] * 4, PLAN)
    assert all(torch.equal(again[name], value) for name, value in kept.items())


def test_a_training_begins_with_the_parameters_that_it_is_given(student: ServedStudent) -> None:
    before = parameters(student)
    learned = train_model_online(student, before, [text(FIRST)], (), PLAN)
    learned = {name: value.clone() for name, value in learned.items()}
    again = train_model_online(student, before, [text(FIRST)], (), PLAN)
    assert all(torch.equal(again[name], value) for name, value in learned.items())


def test_long_texts_are_cut_to_the_end_of_the_prompt_and_to_the_size_of_a_batch(student: ServedStudent) -> None:
    lengths: list[tuple[int, ...]] = []
    module = student.module.register_forward_pre_hook(
        lambda _, __, given: lengths.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    tokens = tuple(range(5, 90)) * 3
    long = ServedText(tokens, 200, 0, torch.empty(len(tokens) - 1, 0))
    train_model_online(student, parameters(student), [long], (), OnlinePlan(steps=1, batch_tokens=150))
    module.remove()
    assert lengths == [(1, 150)]


def test_a_pause_during_a_measure_leaves_out_no_later_one(
    student: ServedStudent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stands still while requests run, perhaps for hours."""
    calls: list[None] = []

    def shared(_: object) -> float:
        calls.append(None)
        if len(calls) == 2:
            time.sleep(3)
        return float(len(calls))

    monkeypatch.setattr(online_model, "share", shared)
    train_model_online(student, parameters(student), [text(FIRST)] * 12, [text(FIRST)] * 4, PLAN)
    assert len(calls) == 4  # before the first step, after each third part
