"""A draft learns the target's probabilities of the texts that it drafted for, not only the tokens that were drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from deploy.distillation import learner_task
from deploy.distillation.learner_task import learn
from tests.support.engines.colocated_decoding import decode_together
from tests.support.models import tiny
from tests.unit.serve.learning.served import BUDGET, TOKENS, Served, passed
from workers.distill.target_head import TargetHead
from workers.serve.configuration import load_configuration
from workers.serve.learning.messages import Candidate, Task

REQUESTS, AT_ONCE, PROMPT = 96, 8, 6


def traffic(served: Served, temperature: float) -> Task:
    """Answer prompts that are all different, once each. Returns the task to learn from them."""
    draw = torch.Generator().manual_seed(3)
    prompts = torch.randint(3, 90, (REQUESTS, PROMPT), generator=draw).tolist()
    for first in range(0, REQUESTS, AT_ONCE):
        requests = {
            f"{number}": (tuple(prompts[number]), SamplingParameters(temperature=temperature, seed=number))
            for number in range(first, first + AT_ONCE)
        }
        decode_together(served.step(), requests, TOKENS, BUDGET)
        served.engine.release([SequenceId(name) for name in requests])
    (texts,) = served.reservoir.salts()
    return passed(Task(served.values, served.weights.of(""), texts.training, texts.left_out, texts.held_back))


def learned(task: Task, monkeypatch: pytest.MonkeyPatch, *, knows: bool) -> tuple[Candidate, int]:
    """The candidate of a training, and at how many texts it knew the target's probabilities."""
    leading, calls = TargetHead.leading, list[None]()

    def counted(*values: Any) -> Any:
        calls.append(None)
        return leading(*values)

    with monkeypatch.context() as patched:
        patched.setattr(TargetHead, "leading", counted)
        if not knows:
            patched.setattr(learner_task, "read_target_head", lambda *_: None)
        return learn(task), len(calls)


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        ("heads", 0.0),
        *(pytest.param(kind, 1.0, marks=pytest.mark.slow) for kind in ("early", "block", "dspark")),
    ],
)
def test_a_draft_that_learns_probabilities_saves_at_least_as_many_steps_as_one_that_learns_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, temperature: float
) -> None:
    """After equally many steps of the training, counted by the verifier on texts that neither has learned from."""
    torch.set_num_threads(1)
    task = traffic(Served(tmp_path, kind), temperature)
    with_tokens, no_calls = learned(task, monkeypatch, knows=False)
    with_probabilities, calls = learned(task, monkeypatch, knows=True)
    assert (no_calls, calls) == (0, len(task.training))
    assert with_tokens.tokens == with_probabilities.tokens
    assert with_probabilities.tokens_per_step > with_probabilities.tokens_per_step_before
    assert with_probabilities.tokens_per_step >= with_tokens.tokens_per_step


def test_the_latest_texts_alone_have_probabilities_where_those_of_all_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probabilities of all texts over a large vocabulary would take longer than a training may, which would be lost."""
    task = traffic(Served(tmp_path, "heads"), 0.0)
    trainable = learner_task._trainable(load_configuration(task.configuration), 0)
    assert trainable.position_products == tiny.VOCABULARY * task.training[0].hidden.shape[1]
    positions = [1 + len(text.tokens) - text.base_len for text in task.training]
    assert all(text.leading is not None for text in learner_task._goals_of(trainable, task.training))
    for latest in (0, 3):
        most = sum(positions[len(positions) - latest :]) * trainable.position_products
        monkeypatch.setattr(learner_task, "_MOST_PRODUCTS", most)
        found = learner_task._goals_of(trainable, task.training)
        assert [text.tokens for text in found] == [text.tokens for text in task.training]
        assert [text.leading is not None for text in found] == [False] * (len(found) - latest) + [True] * latest
