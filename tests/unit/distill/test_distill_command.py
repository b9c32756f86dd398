"""`pilotfish distill` makes the directory of a draft from prompt files."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
from collections.abc import Iterator
from copy import copy
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from cluster.core.errors import ConfigurationError
from deploy.distillation import target as distillation_target
from deploy.distillation.command import distill
from deploy.signals import SIGNALLED
from tests.support.models import distilled_draft
from tests.support.terminal import CTRL_C, in_terminal
from tests.unit.distill.conftest import Command
from workers.distill.answers import read_answers
from workers.distill.checkpoints import TENSORS
from workers.distill.options import DistillOptions

pytestmark = pytest.mark.slow


class DistillRun(Command):
    """The command that makes a draft of layers, with more prompts and an evaluation."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(directory, monkeypatch)
        self.draft = directory / "draft"
        self.write("tasks", [{"instruction": f"Say {number}.", "instances": [{"input": ""}]} for number in range(10)])
        categories = ("qa", "writing", "math", "qa", "qa")
        self.write("bench", [{"turns": ["One?", "Two?"], "category": category} for category in categories])
        (directory / "notes.md").write_text("## Notes\n\nA sweep.\n")

    def arguments(self, *more: str) -> list[str]:
        """The words of the command after its name."""
        own = ["--prompts", str(self.directory / "tasks.jsonl"), "--layers", "0,2", "--vocabulary-size", "100"]
        own += ["--evaluate", str(self.directory / "bench.jsonl"), "--evaluate-prompts", "2"]
        return self.words(self.draft, *own, "--notes", str(self.directory / "notes.md"), *more)

    def run(self, *more: str) -> int:
        """Run the command. Returns its exit code."""
        return self.run_words(self.arguments(*more))


@pytest.fixture(scope="module")
def distill_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DistillRun]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield DistillRun(tmp_path_factory.mktemp("distill_run"), monkeypatch)


@pytest.fixture(scope="module")
def finished_run(distill_run: DistillRun) -> DistillRun:
    """A run of the command that has finished."""
    assert distill_run.run("--steps", "4") == 0
    return distill_run


def test_the_target_answers_the_prompts(finished_run: DistillRun) -> None:
    answers = read_answers(finished_run.work / "answers.jsonl")

    assert {answer.key.split(":")[0] for answer in answers} == {"questions.jsonl", "tasks.jsonl"}
    assert sum(answer.held_out for answer in answers) == 3  # two of twenty, one of ten
    training = [answer for answer in answers if not answer.held_out]
    assert sum(len(answer.answer) for answer in training) >= 240
    for answer in training:
        assert answer.leading is not None
        assert answer.leading.tokens.shape == (len(answer.answer), 16)
        if answer.temperature == 0:
            assert answer.leading.tokens[:, 0].tolist() == list(answer.answer)


def test_evaluation_prompts_are_chosen_by_task_and_answered_greedily(finished_run: DistillRun) -> None:
    evaluation = read_answers(finished_run.work / "evaluation.jsonl")

    assert sorted(answer.category for answer in evaluation) == ["mt_bench", "mt_bench", "qa", "qa"]
    assert {answer.temperature for answer in evaluation} == {0.0}


def test_the_directory_can_be_shipped(finished_run: DistillRun) -> None:
    assert sorted(file.name for file in finished_run.draft.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "training.png",
    ]
    assert len(load_file(finished_run.draft / "model.safetensors")["vocabulary"]) == 100
    assert distilled_draft.stored_card(finished_run.draft)["target"] == "tiny"


def test_the_card_states_the_command_without_directories(finished_run: DistillRun) -> None:
    card = (finished_run.draft / "README.md").read_text()

    for words in (
        "pilotfish distill",
        "--set target.path=target",
        "--prompts questions.jsonl",
        "--prompts tasks.jsonl",
        "--layers 0,2",
        "--steps 4",
        "held-out prompts",
        "The target answered 4 prompts of bench.jsonl.",
        "bench.jsonl: mt_bench",
        "## Notes",
    ):
        assert words in card
    assert str(finished_run.directory) not in card
    assert "/" not in card.split("```")[1]


def test_a_recipe_trains_the_draft_of_the_equal_options_and_the_card_names_it(finished_run: DistillRun) -> None:
    again = copy(finished_run)
    again.draft, again.work = finished_run.directory / "by-recipe", finished_run.directory / "by-recipe.work"
    again.work.mkdir()
    for file in finished_run.work.glob("*.jsonl"):  # the target's answers
        shutil.copy(file, again.work)
    recipe = finished_run.directory / "mine.yaml"
    files = "prompts: [questions.jsonl, tasks.jsonl]\nevaluate: bench.jsonl\n"
    recipe.write_text(f"{files}evaluate_prompts: 2\nlayers: [0, 2]\nvocabulary_size: 100\nsteps: 4\n")
    words = ["--set", f"target.path={again.target}", "--set", "target.served_name=tiny", "--device", "cpu"]
    words += ["--set", "target.kv.pool_bytes=4194304", "--answer-tokens", "240", "--max-tokens", "8"]
    words += ["--held-out", "3", "--precision", "float32", "--out", str(again.draft), "--work", str(again.work)]

    assert again.run_words([*words, "--recipe", str(recipe)]) == 0

    before, after = (load_file(one.draft / "model.safetensors") for one in (finished_run, again))
    assert before.keys() == after.keys()
    assert all(value.equal(after[name]) for name, value in before.items())
    card = (again.draft / "README.md").read_text()
    assert "--recipe mine.yaml" in card and "--layers 0,2" in card and str(again.directory) not in card


def test_finished_stages_are_not_repeated(finished_run: DistillRun, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = (finished_run.work / "answers.jsonl").read_bytes()
    weights = load_file(finished_run.draft / "model.safetensors")
    monkeypatch.setattr(distillation_target, "LocalCluster", None)  # starting it would be an error

    assert finished_run.run("--steps", "4") == 0

    assert (finished_run.work / "answers.jsonl").read_bytes() == answered
    again = load_file(finished_run.draft / "model.safetensors")
    assert all(value.equal(again[name]) for name, value in weights.items())


async def test_ctrl_c_keeps_the_last_step_and_the_same_command_goes_on_from_it(distill_run: DistillRun) -> None:
    stopped = copy(distill_run)
    stopped.draft, stopped.work = distill_run.directory / "stopped", distill_run.directory / "stopped.work"

    async with in_terminal("distill", *stopped.arguments("--steps", "100000")) as terminal:
        seen = int((await terminal.shows(r"training: epoch \d+, step (\d+)"))[1])
        terminal.type(CTRL_C)
        await terminal.shows(f"stopped; what is done is in .*{stopped.work.name}, and the same command goes on")
        assert await terminal.ends() == SIGNALLED
    with safe_open(stopped.work / TENSORS, framework="pt") as file:
        kept = json.loads(file.metadata()["progress"])["step"]
    assert kept >= seen
    answered = (stopped.work / "answers.jsonl").read_bytes()

    assert await asyncio.to_thread(stopped.run, "--steps", str(kept + 1)) == 0
    assert f": {kept + 1:,} steps" in (stopped.draft / "README.md").read_text()
    assert (stopped.work / "answers.jsonl").read_bytes() == answered


def test_a_draft_can_be_trained_further(finished_run: DistillRun) -> None:
    before = load_file(finished_run.draft / "model.safetensors")
    further = copy(finished_run)
    further.draft, further.work = finished_run.directory / "further", finished_run.directory / "further.work"

    assert (
        further.run("--steps", "1", "--layers", "", "--start", str(finished_run.draft), "--learning-rate", "1e-9") == 0
    )

    after = load_file(further.draft / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(
        value.equal(after[name]) for name, value in before.items()
    )  # the step is below the resolution of bfloat16
    card = (further.draft / "README.md").read_text()
    assert "It started as layers 0, 2 of the target, and continues the training of draft." in card
    assert "--start draft" in card


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--steps", "0"), "--steps: 0 is refused; it must be above 0"),
        ((), "--minutes and --steps: needed one of them"),
        (("--steps", "1", "--minutes", "1"), "--minutes and --steps: needed one of them"),
        (("--steps", "1", "--precision", "float8"), "--precision: 'float8' is refused"),
        (("--steps", "1", "--device", "tpu"), "--device: 'tpu' is refused; it must be auto, cpu or cuda"),
        (("--steps", "1", "--layers", "0;1"), "--layers: '0;1' is refused; it must be numbers with commas"),
        (("--steps", "1", "--held-out", "-1"), "--held-out: -1 is refused; it must be 0 or above"),
        (
            ("--steps", "1", "--temperatures", "0,-1"),
            "--temperatures: -1.0 is refused; each must be within 0 and 1e+06",
        ),
        (("--steps", "1", "--temperatures", "nan"), "--temperatures: nan is refused; each must be within 0 and"),
        (("--steps", "1", "--on-policy", "1.5"), "--on-policy: 1.5 is refused; it must be within 0 and 1"),
        (("--steps", "1", "--loss", "hinge"), "loss: 'hinge' is unknown"),
        (("--steps", "1", "--layers", "0,3"), "layers: 3 is refused; it must be within 0 and 2"),
        (("--steps", "1", "--vocabulary-size", "321"), "vocabulary_size: 321 is refused; it must be within 1 and 320"),
        (("--steps", "1", "--start", "absent"), "--start: a draft has its layers; needed without --layers"),
        (("--steps", "1", "--layers", "", "--start", "absent"), "--start absent: no such file"),
        (
            ("--steps", "1", "--prompts", "elsewhere/bench.jsonl"),
            "--prompts and --evaluate: files of the same name, bench.jsonl, are refused",
        ),
        (("--steps", "1", "--prompts", "absent.jsonl"), "--prompts absent.jsonl: no such file"),
    ],
)
def test_invalid_options_are_refused_before_any_work(
    distill_run: DistillRun,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(distillation_target, "LocalCluster", None)  # starting it would be an error

    assert distill_run.run(*more) == 2

    assert message in capsys.readouterr().err


def test_every_field_of_the_options_is_an_option_of_the_command_with_the_same_default() -> None:
    written = {name: parameter.default for name, parameter in inspect.signature(distill).parameters.items()}

    for field in fields(DistillOptions):
        required = field.default is MISSING
        assert written.pop(field.name) == (inspect.Parameter.empty if required else field.default), field.name
    assert written == {"config": None, "assignments": None, "recipes_wanted": False, "context": inspect.Parameter.empty}


def test_prompts_are_required() -> None:
    with pytest.raises(ConfigurationError, match="--prompts: needed at least one file"):
        DistillOptions(prompts=(), out=Path("out"), work=Path("work"), steps=1)
