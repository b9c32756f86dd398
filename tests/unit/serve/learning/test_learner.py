"""A drafter learns from what it serves: acceptance rises, texts stay, tenants are apart, failures cost nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.drafting import DraftBudget
from cluster.core.ids import CacheSalt, SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, StepResult
from deploy.distillation.learner_process import learn
from tests.support.engines.colocated_decoding import Decoded, decode_together
from tests.support.models import drafting_modules, tiny
from workers.draft.common.learning import LearnsOnline, Reservoir, salt_key
from workers.draft.registry import create
from workers.model.draft_shapes import HeadsShape
from workers.serve.configuration import load_configuration
from workers.serve.learning.learner import Learner, LearnerOptions
from workers.serve.learning.messages import Candidate, Task
from workers.serve.learning.versions import Versions, roll_back
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine

TOKENS = 24
BUDGET = DraftBudget(3, 3)
TIMES = 10
"""How often the traffic is repeated before a training."""
PROMPTS = {
    str(number): (tuple(range(7 + number, 13 + number)), SamplingParameters(temperature=temperature, seed=number))
    for number, temperature in enumerate((0.0, 0.0, 0.7, 0.0))
}
COMMAND = (sys.executable, "-m", "deploy.distillation.learner_process", "0")
"""The learner's process with the usual priority, so that a loaded machine does not delay the test."""


class Served:
    """A tiny target with heads that know nothing, and the traffic that it has seen."""

    def __init__(self, directory: Path) -> None:
        target = tiny.save(directory / "target", tiny.llama())
        drafting_modules.save(target, directory / "heads", "heads", (2,), shape=HeadsShape(3, 0, 0))
        self.values: dict[str, Any] = {
            "target": {
                "path": str(target),
                "device": "cpu",
                "dtype": "float32",
                "compile": "off",
                "kv": {"pool_bytes": 4 << 20},
                "evidence": {"taps": (2,)},
            },
            "draft": {
                "method": "heads",
                "max_nodes": 3,
                "max_depth": 3,
                "heads": {"path": str(directory / "heads"), "weights": "float32", "candidates": 1},
            },
        }
        configuration = load_configuration(self.values)
        method = create(configuration.draft, configuration.target)
        assert isinstance(method, LearnsOnline)
        self.method: LearnsOnline = method
        self.engine: TargetEngine = build_engine(configuration.target, method=method)
        self.reservoir = Reservoir(1 << 22)
        self.method.collect_into(self.reservoir)
        self.served = 0

    def step(self, salt: str = "a/", *, allows: bool = True) -> Callable[[StepBatch], StepResult]:
        """Steps of requests with a salt and their consent."""

        def with_start(batch: StepBatch) -> StepResult:
            rows = tuple(
                row
                if row.start is None
                else replace(row, start=replace(row.start, cache_salt=CacheSalt(salt), allows_learning=allows))
                for row in batch.rows
            )
            return self.engine.step(StepBatch(rows))

        return with_start

    def serve(self, salt: str = "a/", *, allows: bool = True) -> list[Decoded]:
        """Answer all prompts once and release them."""
        self.served += 1
        named = {f"{name}-{self.served}": prompt for name, prompt in PROMPTS.items()}
        found = decode_together(self.step(salt, allows=allows), named, TOKENS, BUDGET)
        self.engine.release([SequenceId(name) for name in found])
        return list(found.values())

    def learner(
        self,
        versions: Versions | None = None,
        command: tuple[str, ...] = COMMAND,
        is_idle: Callable[[], bool] = lambda: True,
    ) -> Learner:
        return Learner(
            self.method,
            self.reservoir,
            self.values,
            versions or Versions(None),
            is_idle,
            LearnerOptions(command, fresh_texts=8, least_held_back=2, idle_seconds=0.05),
        )


@pytest.fixture
def served(tmp_path: Path) -> Served:
    torch.set_num_threads(1)
    return Served(tmp_path)


def answers(found: Sequence[Decoded]) -> list[list[int]]:
    return [one.answer[:TOKENS] for one in found]


def accepted(found: Sequence[Decoded]) -> int:
    return sum(one.accepted for one in found)


def trees(found: Sequence[Decoded]) -> list[list[TokenTree]]:
    return [[proposal.tree for proposal in one.proposals] for one in found]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def learn_here(served: Served, key: str) -> Mapping[str, torch.Tensor]:
    """Weights that are learned in this process from what is stored of a salt."""
    (texts,) = (one for one in served.reservoir.salts() if one.key == key)
    task = Task(served.values, served.method.weights_of(key), texts.training, texts.held_back)
    candidate = learn(Task.decode(task.encode()))
    assert Candidate.decode(candidate.encode()).is_better
    return candidate.weights


def test_repeated_traffic_is_drafted_better_after_a_swap_and_its_texts_stay(served: Served, tmp_path: Path) -> None:
    before = [served.serve() for _ in range(TIMES)][-1]
    versions = Versions(tmp_path / "versions")
    learner = served.learner(versions)
    assert learner.learn_once()
    assert learner.candidate is not None
    assert learner.candidate.tokens_per_step > learner.candidate.tokens_per_step_before
    after = served.serve()
    assert versions.served(salt_key("a/")) == 1
    assert answers(after) == answers(before)
    assert accepted(after) > accepted(before)


def test_a_swap_between_two_steps_changes_no_text(served: Served) -> None:
    before = [served.serve() for _ in range(TIMES)][-1]
    weights = learn_here(served, salt_key("a/"))
    step, count = served.step(), 0

    def swapping(batch: StepBatch) -> StepResult:
        nonlocal count
        count += 1
        if count in (4, 8):
            served.method.replace_weights(salt_key("a/"), weights if count == 4 else None)
        return step(batch)

    assert answers(list(decode_together(swapping, PROMPTS, TOKENS, BUDGET).values())) == answers(before)
    assert count > 8


def test_what_one_client_taught_is_not_drafted_for_another(served: Served) -> None:
    """The taught text is drafted for its own client, and every draft for the other one is as before."""
    before_b = served.serve("b/", allows=False)
    for _ in range(TIMES):
        before_a = served.serve("a/")
    served.method.replace_weights(salt_key("a/"), learn_here(served, salt_key("a/")))
    after_a, after_b = served.serve("a/"), served.serve("b/", allows=False)
    assert accepted(after_a) > accepted(before_a)
    assert trees(after_b) != trees(after_a)
    assert trees(after_b) == trees(before_b)


def test_nothing_is_collected_without_consent(served: Served) -> None:
    served.serve(allows=False)
    assert (served.reservoir.seen, served.reservoir.stored_bytes) == (0, 0)


@pytest.mark.parametrize(
    "program", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)", "print('no weights')"]
)
def test_a_learner_that_fails_changes_nothing(served: Served, program: str) -> None:
    before = [served.serve() for _ in range(TIMES)][-1]
    learner = served.learner(command=(sys.executable, "-c", program))
    assert not learner.learn_once()
    after = served.serve()
    assert trees(after) == trees(before)


def test_the_learner_stands_still_while_requests_run_and_ends_with_its_owner(served: Served, tmp_path: Path) -> None:
    for _ in range(TIMES):
        served.serve()
    file, is_idle = tmp_path / "work", threading.Event()
    is_idle.set()
    program = f"import time\nwhile True:\n    open({str(file)!r}, 'a').write('x')\n    time.sleep(0.01)"
    learner = served.learner(command=(sys.executable, "-c", program), is_idle=is_idle.is_set)
    learner.start()
    wait_until(file.exists)
    is_idle.clear()
    time.sleep(0.5)
    size = file.stat().st_size
    time.sleep(0.5)
    assert file.stat().st_size == size
    is_idle.set()
    wait_until(lambda: file.stat().st_size > size)
    learner.close()
    size = file.stat().st_size
    time.sleep(0.2)
    assert file.stat().st_size == size


def test_a_restart_serves_the_last_version_and_a_rollback_the_one_before(served: Served, tmp_path: Path) -> None:
    before = [served.serve() for _ in range(TIMES)][-1]
    weights = learn_here(served, salt_key("a/"))
    versions = Versions(tmp_path / "versions")
    assert (
        versions.store(salt_key("a/"), served.method.weights_of(salt_key("a/"))),
        versions.store(salt_key("a/"), weights),
    ) == (1, 2)
    learner = served.learner(Versions(tmp_path / "versions"))
    learner.start()
    learner.close()
    better = served.serve()
    assert accepted(better) > accepted(before)
    assert roll_back(tmp_path / "versions") == {salt_key("a/"): 1}
    learner = served.learner(Versions(tmp_path / "versions"))
    learner.start()
    learner.close()
    assert trees(served.serve()) == trees(before)
    assert answers(better) == answers(before)


def test_weights_that_do_not_fit_or_are_not_finite_are_refused(served: Served) -> None:
    weights = dict(served.method.weights_of("a"))
    name = next(iter(weights))
    with pytest.raises(ValueError, match="finite"):
        served.method.replace_weights("a", weights | {name: weights[name] * float("nan")})
    with pytest.raises(ValueError, match="names and shapes"):
        served.method.replace_weights("a", {})
