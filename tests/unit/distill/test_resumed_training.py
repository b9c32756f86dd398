"""A training of EAGLE-3 or DSpark that was interrupted goes on with the texts that it began with."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from deploy.distillation import dspark, single_process, training_card
from deploy.distillation.checkpoints import FileCheckpoints
from deploy.distillation.execute import execute
from deploy.distillation.rank_writer import RankWriter
from deploy.distillation.single_process import SingleProcess, Texts
from deploy.distillation.training_directory import TrainingDirectory
from tests.unit.distill.training_folder import KINDS, STEPS, Folder
from workers.distill.answers import Answer
from workers.distill.device_training import DeviceTraining, Resumed
from workers.distill.peers import Peers

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


@pytest.mark.slow
def test_the_card_and_the_curve_of_a_stopped_training_have_both_of_its_parts(
    folders: Callable[[str], Folder], stop_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were taken twice are told once."""
    drawn: list[list[int]] = []
    monkeypatch.setattr(
        training_card, "loss_curve", lambda progress, **_: drawn.append([step for step, *_ in progress.losses])
    )
    folder = folders("stopped")
    stop_at(STOPPED)
    with pytest.raises(KeyboardInterrupt):
        folder.train()
    stop_at(0)

    folder.train()

    card = (folder.path / "out" / "README.md").read_text()
    assert [int(step) for step in re.findall(r"epoch \d+, step (\d+) ", card)] == [*range(1, STEPS + 1)] == drawn[-1]
    assert card.count("the training goes on from step ") == 1 and card.count("the target starts on 1 rank") == 1
    assert card.index("step 1 ") < card.index("goes on from step ") < card.index(f"step {STEPS} ")


def finished(folder: Folder, rank: int) -> SingleProcess:
    """A run of process `rank` of two, whose training has ended with a draft."""
    make, _ = KINDS[folder.kind]
    run: SingleProcess = make.Run(make.options(folder.words()), folder.told.append, Peers(rank, 2))
    kept = run.directory_of_training = TrainingDirectory(folder.path / "training")
    (folder.path / "draft").mkdir()
    (folder.path / "draft" / "README.md").write_text("# A draft")
    (folder.path / "draft" / "config.json").write_text('{"pilotfish_draft": {}}')
    kept.begin([], [])
    kept.keep(folder.path / "draft", 2.5)
    kept.finish()
    return run


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_one_writes_the_draft_of_a_training_that_has_ended(
    rank: int, directory: Path, tmp_path: Path
) -> None:
    folder = Folder("eagle3", tmp_path / "folder", directory, ())

    assert finished(folder, rank).had_ended()

    assert (folder.path / "out").exists() == (rank == 0)


class Waits(dspark.Run):
    """A run that starts the same command again while it runs."""

    refused = ""

    def texts(self) -> Texts:
        with pytest.raises(ConfigurationError) as refused:
            execute(dspark.Run, self.options, self._told)
        Waits.refused = str(refused.value)
        raise KeyboardInterrupt


def test_a_second_command_for_a_training_that_runs_is_refused(directory: Path, tmp_path: Path) -> None:
    """Two trainings in one directory would remove each other's state, or write the same file."""
    folder = Folder("dspark", tmp_path / "folder", directory, ())
    for _ in range(2):  # once the first one has died, another one may begin
        with pytest.raises(KeyboardInterrupt):
            execute(Waits, dspark.options(folder.words()), folder.told.append)
        assert re.fullmatch(r"training .*/out-\w+: another process has it open; needed one at a time", Waits.refused)
        Waits.refused = ""


HOLDS = """\
import sys, time
from pathlib import Path
from deploy.distillation.training_directory import TrainingDirectory
with TrainingDirectory(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_training_whose_process_was_killed_is_free(tmp_path: Path) -> None:
    kept = TrainingDirectory(tmp_path / "work" / "training")
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(kept.path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match="another process has it open"), kept.held():
            pass
        process.kill()
    with kept.held():
        kept.begin([], [])  # what is in the directory is removed, but not who has it
        with pytest.raises(ConfigurationError, match="another process has it open"), kept.held():
            pass


def test_the_best_draft_is_kept_and_comes_back(tmp_path: Path) -> None:
    out, kept = tmp_path / "out", TrainingDirectory(tmp_path / "training")
    out.mkdir()
    for name, text in {"README.md": "# A draft", "config.json": '{"pilotfish_draft": {}}', "weights": "1"}.items():
        (out / name).write_text(text)
    kept.begin([], [3, 5])
    assert kept.best() == -float("inf") and kept.vocabulary == (3, 5) and not kept.is_begun

    kept.keep(out, 2.5)
    (out / "weights").write_text("2")
    kept.restore(out)

    assert kept.best() == 2.5 and (out / "weights").read_text() == "1"
    assert sorted(file.name for file in out.iterdir()) == ["README.md", "config.json", "weights"]


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
