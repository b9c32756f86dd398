"""A training of EAGLE-3 or DSpark that was interrupted goes on with the texts that it began with."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deploy.distillation import single_process
from deploy.distillation.checkpoints import FileCheckpoints
from deploy.distillation.rank_writer import RankWriter
from deploy.distillation.training_directory import TrainingDirectory
from tests.unit.distill.training_folder import Folder
from workers.distill.answers import Answer
from workers.distill.device_training import DeviceTraining, Resumed

STOPPED = 5


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
def test_a_machine_with_other_instructions_begins_another_training(
    folders: Callable[[str], Folder], stop_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products in another type come with other optimizers, whose state cannot go on."""
    folder = folders("moved")
    monkeypatch.setattr(RankWriter, "settings", "")  # as with a configuration that names the target's type
    monkeypatch.setattr(single_process, "multiplies_bfloat16", lambda _: False)
    stop_at(STOPPED)
    with pytest.raises(KeyboardInterrupt):
        folder.train()
    stop_at(0)
    monkeypatch.setattr(single_process, "multiplies_bfloat16", lambda _: True)

    folder.train()

    assert not folder.has_told("goes on")


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
