"""A training of EAGLE-3 or DSpark that was interrupted goes on with the texts that it began with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deploy.distillation import dspark, eagle3
from deploy.distillation.checkpoints import FileCheckpoints
from deploy.distillation.execute import execute
from deploy.distillation.training_directory import TrainingDirectory
from tests.support.engines.kept_kernels import KEPT
from tests.unit.distill.conftest import LENGTH, PROMPT
from workers.distill.answers import Answer, AnswerFile
from workers.distill.device_training import DeviceTraining, Resumed

STEPS, STOPPED = 8, 5
KINDS: dict[str, tuple[ModuleType, list[str]]] = {
    "eagle3": (eagle3, ["--vocabulary-size", "48", "--depths", "2", "--batch-tokens", "160"]),
    "dspark": (dspark, ["--slots", "3", "--layers", "2", "--rank", "8", "--blocks", "8", "--batch-rows", "2"]),
}


class Folder:
    """Texts of the tiny target, and a draft that is trained on them."""

    def __init__(self, kind: str, path: Path, target: Path, answers: Sequence[Answer]) -> None:
        path.mkdir()
        self.kind, self.path, self.target, self.told = kind, path, target, list[str]()
        (path / "prompts.jsonl").write_text(json.dumps({"question": "What is one?"}) + "\n")
        self.add(replace(one, held_out=number < 2) for number, one in enumerate(answers))

    def add(self, answers: Any) -> None:
        with AnswerFile(self.path / "answers.jsonl") as file:
            for answer in answers:
                file.append(answer)

    def train(self, *more: str) -> dict[str, Tensor]:
        """Train in this process. Returns the weights of the draft."""
        make, _ = KINDS[self.kind]
        self.told.clear()
        execute(make.Run, make.options(self.words(*more)), self.told.append)
        return self.weights()

    def train_apart(self, dies: int) -> int:
        """Train in a process, which kills itself before the step of this number, once. Returns its exit code."""
        module = "tests.unit.distill.training_in_processes"
        command = [sys.executable, "-m", module, self.kind, json.dumps(self.words()), str(dies)]
        kept = os.environ | {"PILOTFISH_CODE_DIR": str(KEPT)}
        return subprocess.run(command, timeout=120, check=False, env=kept).returncode

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.path / "out" / "model.safetensors")

    def words(self, *more: str) -> list[str]:
        """The options of the command."""
        _, own = KINDS[self.kind]
        words = ["--target", str(self.target), "--prompts", str(self.path / "prompts.jsonl"), *own, *more]
        words += ["--out", str(self.path / "out"), "--answers", str(self.path / "answers.jsonl"), "--device", "cpu"]
        words += ["--write-seconds", "0", "--steps", str(STEPS), "--report-seconds", "0", "--max-tokens", str(LENGTH)]
        return [*words, "--max-length", str(2 * (PROMPT + LENGTH))]

    def has_told(self, text: str) -> bool:
        return any(text in line for line in self.told)


@pytest.fixture(params=sorted(KINDS))
def folders(
    request: pytest.FixtureRequest, tmp_path: Path, directory: Path, answers: tuple[Answer, ...]
) -> Callable[[str], Folder]:
    return lambda name: Folder(request.param, tmp_path / name, directory, answers)


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function after which Ctrl-C comes in the step of a number, counted from 1; 0 stands for never."""
    original, steps = DeviceTraining._step, list[int]()

    def begin(step: int) -> None:
        steps.clear()

        def counted(training: Any, *arguments: Any) -> Any:
            steps.append(1)
            if len(steps) == step:
                raise KeyboardInterrupt
            return original(training, *arguments)

        monkeypatch.setattr(DeviceTraining, "_step", counted)

    return begin


def others(answers: Sequence[Answer]) -> list[Answer]:
    """Texts in which other tokens are frequent."""
    return [replace(one, key=f"other:{one.key}", answer=tuple(95 - token for token in one.answer)) for one in answers]


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
def test_a_repeated_command_goes_on_as_if_nothing_had_happened(
    folders: Callable[[str], Folder], answers: tuple[Answer, ...], stop_at: Callable[[int], None]
) -> None:
    """Also where the file has more texts by then, in which other tokens are frequent."""
    whole = folders("whole").train()
    halved = folders("halved")
    stop_at(STOPPED)
    with pytest.raises(KeyboardInterrupt):
        halved.train()
    halved.add(others(answers))
    stop_at(0)

    weights = halved.train()

    assert halved.has_told("the training goes on from step ")
    assert_equal(weights, whole)


@pytest.mark.slow
def test_a_process_that_was_killed_changes_no_bit(folders: Callable[[str], Folder]) -> None:
    whole, killed = folders("whole"), folders("killed")
    assert whole.train_apart(dies=0) == 0

    assert killed.train_apart(dies=STOPPED) == -signal.SIGKILL
    assert killed.train_apart(dies=STOPPED) == 0

    assert_equal(killed.weights(), whole.weights())


@pytest.mark.slow
def test_a_training_that_ended_is_not_repeated_and_its_draft_is_written_again(
    folders: Callable[[str], Folder], stop_at: Callable[[int], None]
) -> None:
    folder = folders("ended")
    whole = folder.train()
    card = (folder.path / "out" / "README.md").read_text()
    shutil.rmtree(folder.path / "out")
    stop_at(1)  # no step is taken

    assert_equal(folder.train(), whole)

    assert folder.has_told("this training has ended") and folder.has_told("out is written")
    assert (folder.path / "out" / "README.md").read_text() == card
    stop_at(0)
    folder.train("--seed", "1")  # another training


@pytest.mark.slow
def test_a_training_whose_texts_are_gone_starts_anew_and_says_so(
    folders: Callable[[str], Folder], answers: tuple[Answer, ...], stop_at: Callable[[int], None]
) -> None:
    other = folders("other")
    (other.path / "answers.jsonl").unlink()
    other.add(others(answers))
    wanted = other.train()
    folder = folders("gone")
    stop_at(STOPPED)
    with pytest.raises(KeyboardInterrupt):
        folder.train()
    (folder.path / "answers.jsonl").unlink()
    folder.add(others(answers))
    stop_at(0)

    weights = folder.train()

    assert folder.has_told("starts anew: ") and not folder.has_told("goes on")
    assert_equal(weights, wanted)


def test_the_best_draft_is_kept_and_comes_back(tmp_path: Path) -> None:
    out, kept = tmp_path / "out", TrainingDirectory(tmp_path / "training")
    out.mkdir()
    for name, text in {"README.md": "# A draft", "pilotfish_draft.json": "{}", "weights": "1"}.items():
        (out / name).write_text(text)
    kept.begin([], [3, 5])
    assert kept.best() == -float("inf") and kept.vocabulary == (3, 5) and not kept.is_begun

    kept.keep(out, 2.5)
    (out / "weights").write_text("2")
    kept.restore(out)

    assert kept.best() == 2.5 and (out / "weights").read_text() == "1"
    assert sorted(file.name for file in out.iterdir()) == ["README.md", "pilotfish_draft.json", "weights"]


class Training:
    """A training with a module alone."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 1, bias=False)
        self.optimizers = (torch.optim.AdamW(self.module.parameters()),)
        self.module(torch.ones(2)).backward()
        self.optimizers[0].step()


def test_writing_states_takes_a_twentieth_of_the_time(tmp_path: Path) -> None:
    times = iter([0.0, 1.0, 15.0, 22.0, 23.0])
    checkpoints = FileCheckpoints(tmp_path / "state", lambda: next(times))
    training: Any = Training()
    found = []
    for step in (1, 2, 3):
        checkpoints.save(training, Resumed(step, 1.5))
        found.append(FileCheckpoints(tmp_path / "state").load(training))

    assert found == [Resumed(1, 1.5), Resumed(1, 1.5), Resumed(3, 1.5)]
