"""`pilotfish distill --kind ...` makes drafting modules that the loader reads."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deploy.distillation import target as distillation_target
from tests.unit.distill.conftest import Command
from workers.distill.budget import Budget
from workers.distill.modules import module_pipeline, module_trainer
from workers.model.draft_card import is_distilled, read_card
from workers.model.draft_shapes import ExitShape
from workers.model.drafting.files import load_drafter
from workers.model.drafting.table import SuccessorTable
from workers.model.formats.registry import read_draft
from workers.model.public_shapes import FeatureShape, MaskedBlockShape, MedusaShape

pytestmark = pytest.mark.slow


class ModuleRun(Command):
    """The command that makes a module."""

    def run(self, kind: str, *more: str) -> int:
        """Run the command. Returns its exit code."""
        size = ["--vocabulary-size", "100"]
        return self.run_words(self.words(self.directory / kind, "--kind", kind, *more, *size))


@pytest.fixture(scope="module")
def module_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleRun]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module_trainer, "_MAX_TOKENS", 8)
        yield ModuleRun(tmp_path_factory.mktemp("module_run"), monkeypatch)


@pytest.mark.parametrize("kind", ["heads", "block", "eagle", "exit"])
def test_the_command_makes_a_module_that_the_loader_reads(
    module_run: ModuleRun, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serving engine shows the hidden states: no other copy of the target is loaded."""
    monkeypatch.setattr(module_pipeline, "load_target", None)

    assert module_run.run(kind, "--steps", "3") == 0

    loaded = load_drafter(module_run.directory / kind, module_run.target, torch.float32, torch.device("cpu"), kind)
    assert loaded.card.target == "tiny"
    assert loaded.card.vocabulary_size == 100
    card = (module_run.directory / kind / "README.md").read_text()
    assert f"The kind is `{kind}`" in card
    assert f"--kind {kind}" in card
    assert str(module_run.directory) not in card
    assert "## Measured tokens per step" in card
    assert "| held-out prompts | " in card
    assert "## Format\n\nPilotfish's own, with `pilotfish_draft` in `config.json`. No public format says" in card
    assert ("## Static tree" in card) == (kind in ("heads", "block"))
    assert bool(loaded.card.tree) == ("uses the static tree" in card)


def test_plain_heads_become_a_public_checkpoint_that_is_trained_further(module_run: ModuleRun, tmp_path: Path) -> None:
    module_run.work = tmp_path / "first"
    plain = ("--steps", "2", "--mix-rank", "0", "--selector-rank", "0", "--depths", "2")
    assert module_run.run("heads", *plain) == 0
    directory = module_run.directory / "heads"
    assert json.loads((directory / "config.json").read_text())["model_type"] == "medusa"
    assert not is_distilled(directory)
    assert "Medusa heads in the layout of vLLM's converter" in (directory / "README.md").read_text()
    directory.rename(module_run.directory / "started")
    module_run.work = tmp_path / "second"

    for _ in range(2):  # the second run replaces the first one's draft
        assert module_run.run("heads", "--steps", "1", "--start", str(module_run.directory / "started")) == 0

    assert "It started as the draft started." in (directory / "README.md").read_text()
    shape = read_draft(directory).shape
    assert isinstance(shape, MedusaShape) and shape.depths == 2


def test_a_second_run_continues_the_curve_of_measured_tokens_per_step(module_run: ModuleRun) -> None:
    for steps in ("3", "4"):
        assert module_run.run("exit", "--steps", steps) == 0

    card = (module_run.directory / "exit" / "README.md").read_text()
    curve = card.partition("| minutes | positions trained on | loss | tokens per step |\n")[2].splitlines()[1:3]
    assert all(line.count("|") == 5 for line in curve)  # after 3 steps, and after 4


def test_a_table_needs_no_training(module_run: ModuleRun) -> None:
    assert module_run.run("table", "--steps", "1", "--depths", "2") == 0

    drafter = load_drafter(module_run.directory / "table", module_run.target, torch.float32, torch.device("cpu"))
    assert isinstance(drafter.module, SuccessorTable)
    assert drafter.module.successors.shape == (320, 2)
    assert int((drafter.module.successors[:, 0] >= 0).sum()) > 10


def test_a_search_finds_the_layers_that_draft(module_run: ModuleRun) -> None:
    assert module_run.run("exit", "--steps", "1", "--search") == 0

    shape = read_card(module_run.directory / "exit").shape
    assert isinstance(shape, ExitShape)
    assert set(shape.layers) < {0, 1, 2}
    assert "## Layers that draft" in (module_run.directory / "exit" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_a_module_can_start_as_layers_of_the_target_and_be_trained_further(
    module_run: ModuleRun, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(module_trainer.ServedMeasure, "measure", lambda *_: None)
    for file in module_run.work.glob("checkpoint-*"):
        file.unlink()

    assert module_run.run(kind, "--steps", "1", "--layers", "0,2", "--learning-rate", "1e-9") == 0
    assert "It started as layers 0, 2 of the target." in (module_run.directory / kind / "README.md").read_text()
    for file in module_run.work.glob("checkpoint-*"):
        file.unlink()
    started = module_run.directory / f"started-{kind}"
    (module_run.directory / kind).rename(started)
    assert module_run.run(kind, "--steps", "1", "--start", str(started), "--learning-rate", "1e-9") == 0

    first, second = (
        load_drafter(directory, module_run.target, torch.float32, torch.device("cpu")).module.state_dict()
        for directory in (started, module_run.directory / kind)
    )
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, atol=1e-2, rtol=1e-2)


def test_minutes_bound_the_whole_command_and_the_plan_is_told_first(
    module_run: ModuleRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Far more answers are wanted than the time allows; the command ends all the same, with a draft."""
    module_run.work = tmp_path / "work"
    began = time.monotonic()

    assert module_run.run("heads", "--minutes", "0.2", "--answer-tokens", "100000000") == 0

    assert time.monotonic() - began < 180  # a busy machine takes long to load and to write
    told = capsys.readouterr().err
    assert "plan for 0.2 min: answers 0.1 min, hidden states 0.0 min, training 0.0 min (up to 0.0 min of them" in told
    assert (module_run.directory / "heads" / "README.md").is_file()


def test_time_that_gives_no_answer_is_refused(
    module_run: ModuleRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module_run.work = tmp_path / "work"

    assert module_run.run("heads", "--minutes", "0.0001") == 2

    assert "answers: needed one to train on, found none" in capsys.readouterr().err


def test_a_disk_without_room_for_hidden_states_is_refused_before_the_target_is_loaded(
    module_run: ModuleRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module_run.work = tmp_path / "work"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    monkeypatch.setattr(module_pipeline, "load_target", None)  # calling it would be another error

    assert module_run.run("heads", "--steps", "1") == 2

    told = " ".join(capsys.readouterr().err.split())
    assert f"--work: {tmp_path / 'work'}" in told
    assert "bytes, and its disk has 1 free" in told


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("medusa", "--steps", "1"), "--kind: 'medusa' is refused; it must be one of layers, heads, block, eagle"),
        (("heads", "--steps", "1", "--optimizer", "sgd"), "--optimizer: 'sgd' is refused; it must be muon or adamw"),
        (("heads", "--steps", "1", "--search"), "--search: refused for kind heads; it is for exit"),
        (("exit", "--steps", "1", "--search", "--layers", "0"), "--search and --layers: needed one of them"),
        (("heads", "--steps", "1", "--taps", "4"), "--taps: [4] is refused; it must be within 0 and 3"),
        (("heads", "--steps", "1", "--taps", "1,2"), "--taps: [1, 2] is refused; heads read one hidden state"),
        (("heads", "--steps", "1", "--depths", "0"), "--depths: 0 is refused; it must be above 0"),
        (("heads", "--steps", "1", "--selector-rank", "-1"), "--selector-rank: -1 is refused; it must be 0 or above"),
        (("exit", "--steps", "1", "--layers", "0,3"), "--layers: [0, 3] is refused; it must be within 0 and 2"),
        (("eagle", "--steps", "1", "--on-policy", "0.5"), "--on-policy: refused for kind eagle"),
        (("exit", "--steps", "1", "--rejection-weight", "2"), "--rejection-weight: refused for kind exit"),
        (("eagle", "--steps", "1", "--rejection-weight", "0"), "--rejection-weight: 0.0 is refused; it must be"),
    ],
)
def test_invalid_options_are_refused_before_any_work(
    module_run: ModuleRun,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(distillation_target, "LocalCluster", None)  # starting it would be an error

    assert module_run.run(*more) == 2

    assert message in capsys.readouterr().err


class TestBudget:
    def test_a_stage_that_is_not_needed_leaves_its_time_to_training(self) -> None:
        now = [100.0]
        whole = Budget.begin(10, needs_answers=True, needs_states=True, clock=lambda: now[0])
        ready = Budget.begin(10, needs_answers=False, needs_states=False, clock=lambda: now[0])

        assert whole.plan() == (
            "plan for 10 min: answers 5.0 min, hidden states 2.0 min, training 2.2 min (up to 0.2 min of them for "
            "tokens per step), measuring 0.8 min at most"
        )
        assert ready.plan() == "plan for 10 min: training 9.2 min, measuring 0.8 min at most"
        assert (whole.answers_end, whole.states_end) == (400.0, 520.0)
        now[0] = 160.0
        assert whole.left_for_answers() == 240.0
        assert whole.left_for_training() == pytest.approx(492.0)

    def test_without_minutes_nothing_is_bounded(self) -> None:
        budget = Budget.begin(None, needs_answers=True, needs_states=True)

        assert budget.left_for_answers() == float("inf")
        assert budget.plan() == "plan: no limit of time"


@pytest.mark.parametrize(
    ("kind", "loaded_as", "size", "refused"),
    [
        ("eagle3", "eagle", 100, ("--int8",)),
        ("dspark", "block", 100, ("--int8",)),
    ],
)
def test_what_one_process_trains_is_a_public_checkpoint_that_is_served(
    module_run: ModuleRun,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    loaded_as: str,
    size: int | None,
    refused: tuple[str, ...],
) -> None:
    module_run.work = tmp_path / "work"
    more = ("--taps", "0,1,2", "--max-length", "200", "--batch-tokens", "400", "--answer-minutes", "0.5", "--recompute")

    assert module_run.run(kind, "--steps", "2", "--depths", "3", *more) == 0

    directory = module_run.directory / kind
    card = load_drafter(directory, module_run.target, torch.float32, torch.device("cpu"), loaded_as).card
    assert (card.target, card.vocabulary_size, card.taps) == ("tiny", size, (0, 1, 2))
    assert isinstance(card.shape, FeatureShape) if kind == "eagle3" else isinstance(card.shape, MaskedBlockShape)
    assert getattr(card.shape, "slots", 3) == 3
    assert json.loads((directory / "config.json").read_text())["speculators_model_type"] == kind
    assert not is_distilled(directory)
    said = " ".join(capsys.readouterr().err.split())
    assert "tokens per step on held out, as it is served, in the first 64 tokens of" in said
    text = (directory / "README.md").read_text()
    assert str(module_run.directory) not in text and "pilotfish distill" in text and "--recompute" in text
    assert (directory / "training.png").exists() == ("![" in text)
    monkeypatch.setattr(distillation_target, "LocalCluster", None)  # starting it would be an error
    assert module_run.run(kind, "--steps", "1", *refused) == 2
    assert f"{refused[0]}: refused for kind {kind}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "loss", "message"),
    [("eagle3", "hinge", "loss: 'hinge' is unknown"), ("dspark", "overlap", "--loss: refused for kind dspark")],
)
def test_a_loss_that_a_kind_does_not_have_is_refused(
    module_run: ModuleRun, capsys: pytest.CaptureFixture[str], kind: str, loss: str, message: str
) -> None:
    assert module_run.run(kind, "--steps", "1", "--loss", loss) == 2
    assert message in capsys.readouterr().err


def test_templates_of_questions_are_refused_where_no_cluster_writes_them(
    module_run: ModuleRun, capsys: pytest.CaptureFixture[str]
) -> None:
    templates = module_run.write("templates", [{"template": "Summarize: {document}"}])
    assert module_run.run("heads", "--steps", "1", "--prompts", str(templates)) == 2
    assert "templates are refused for kind heads" in capsys.readouterr().err
