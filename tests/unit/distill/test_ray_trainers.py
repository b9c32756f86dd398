"""Two processes of Ray Train train what one process trains, and go on from the last checkpoint when one is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.kept_kernels import KEPT
from tests.unit.distill.training_folder import LAYERS, LENGTH, PROMPT
from workers.distill.answers import Answer, AnswerFile, read_answers
from workers.distill.modules.tap_cache import states_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs ray[train]"),
]

STEPS, DIES = 10, 8
BOUND = 1e-4
"""Largest difference of two small weights. A training moves them by up to 1e-2."""
ROUNDED = 0.05
"""Largest share of weights that are stored as neighbouring numbers."""
_EAGER = {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1", "PILOTFISH_CODE_DIR": str(KEPT)}


SMALL = {
    "dspark": {"slots": 3, "layers": 2, "rank": 8, "blocks": 8, "batch-rows": 4},
    "eagle3": {"depths": 2, "vocabulary-size": 48, "batch-tokens": 160, "taps": "1,3,5", "learning-rate": 2e-4},
}
"""Options of a small training of each kind. Roll-outs through the target's large weights amplify what is rounded."""

FIRST_LAYERS = {"dspark": (0, LAYERS - 1), "eagle3": (LAYERS - 1,)}
"""Layers of the target that a draft begins as."""


@pytest.fixture(scope="module")
def words(answers: tuple[Answer, ...], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a training on the answers of the tiny target, whose hidden states are stored."""
    work = tmp_path_factory.mktemp("texts")
    (work / "prompts.jsonl").write_text(json.dumps({"question": "What is one?"}) + "\n")
    with AnswerFile(work / "answers.jsonl") as file:
        for answer in answers:
            file.append(answer)
    given = {"prompts": work / "prompts.jsonl", "answers": work / "answers.jsonl", "states": work / "states"}
    # In float32, as on every CPU.
    sizes: dict[str, object] = {"max-length": 2 * (PROMPT + LENGTH), "max-tokens": LENGTH, "precision": "float32"}
    return as_words({"write-seconds": 0, "steps": STEPS, "device": "cpu", "parts": 2, **sizes, **given})


def as_words(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def without_layers(directory: Path, kept: Sequence[int], out: Path) -> Path:
    """A copy of a target whose files lack all layers but some."""
    shutil.copytree(directory, out)
    weights = load_file(directory / "model.safetensors")
    for name in list(weights):
        found = re.search(r"layers\.(\d+)\.", name)
        if found is not None and int(found[1]) not in kept:
            del weights[name]
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def command_of(kind: str, words: list[str], out: Path, workers: int, dies: int) -> list[str]:
    """The command line of a training in so many processes."""
    given = [*words, *as_words(SMALL[kind]), "--out", str(out), "--workers", str(workers)]
    return [sys.executable, "-m", "tests.unit.distill.training_in_processes", kind, json.dumps(given), str(dies)]


def ended(command: list[str]) -> subprocess.CompletedProcess[str]:
    """What a command has printed, once it has ended."""
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | _EAGER)


def trained(kind: str, words: list[str], out: Path, workers: int, dies: int = 0) -> dict[str, torch.Tensor]:
    """The weights after a training in so many processes."""
    done = ended(command_of(kind, words, out, workers, dies))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    weights = load_file(out / "model.safetensors")
    return {name: value.float() for name, value in weights.items()}


def assert_equal_but_for_rounding(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Weights are stored in bfloat16, so a sum in another order may round a few of them to the next number."""
    pairs = [(value.flatten(), other[name].flatten()) for name, value in one.items()]
    values, others = (torch.cat(each) for each in zip(*pairs, strict=True))
    torch.testing.assert_close(others, values, rtol=2**-7, atol=BOUND)
    assert (values != others).float().mean() <= ROUNDED


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_processes_train_what_one_trains_and_survive_a_kill(
    kind: str, words: list[str], directory: Path, tmp_path: Path
) -> None:
    """Trainers in processes read stored hidden states, and of the target its ends and the layers a draft begins as.

    A repeated command writes the draft of a training that has ended again.

    The optimizer is AdamW, which moves weights by about the learning rate, however small a gradient.
    """
    rest = without_layers(directory, FIRST_LAYERS[kind], tmp_path / "rest")
    alone = trained(kind, [*words, "--target", str(directory)], tmp_path / "alone", 1)
    states = Path(words[words.index("--states") + 1])
    shutil.copytree(states_of(directory, states), states_of(rest, states), dirs_exist_ok=True)
    killed = trained(kind, [*words, "--target", str(rest)], tmp_path / "killed", 2, dies=DIES)

    assert Path(f"{tmp_path / 'killed'}.died").exists()
    assert_equal_but_for_rounding(alone, killed)
    shutil.rmtree(tmp_path / "killed")
    again = trained(kind, [*words, "--target", str(rest)], tmp_path / "killed", 2, dies=DIES)
    assert all(torch.equal(again[name], value) for name, value in killed.items())


def test_a_repeated_command_goes_on_with_the_texts_that_it_began_with(
    words: list[str], directory: Path, tmp_path: Path
) -> None:
    """All of its processes are killed while they start again. Texts of other tokens are in the file by then."""
    own = {name: tmp_path / "texts" / Path(words[words.index(f"--{name}") + 1]).name for name in ("answers", "states")}
    shutil.copytree(Path(words[words.index("--answers") + 1]).parent, tmp_path / "texts")
    words = [*words, *as_words(own), "--target", str(directory)]
    alone = trained("eagle3", words, tmp_path / "alone", 1)
    out, texts = tmp_path / "many", own["answers"]
    process = subprocess.Popen(
        command_of("eagle3", words, out, 2, DIES), start_new_session=True, env=os.environ | _EAGER
    )
    while not Path(f"{out}.died").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert list(texts.parent.glob("many-*/ray/**/state.safetensors"))
    with AnswerFile(texts) as file:
        for answer in read_answers(texts):
            file.append(replace(answer, key=f"other:{answer.key}", answer=tuple(95 - token for token in answer.answer)))

    assert_equal_but_for_rounding(alone, trained("eagle3", words, out, 2, DIES))


def test_a_training_that_its_processes_refuse_is_not_started_again(
    words: list[str], directory: Path, tmp_path: Path
) -> None:
    words = [*words, "--target", str(directory), "--learning-rate", "1e30"]
    kind = "dspark"  # the other one has a rate of its own here

    done = ended(command_of(kind, words, tmp_path / "out", 2, 0))

    assert done.returncode == 1
    assert "\ncluster.core.errors.ConfigurationError: --learning-rate: 1e+30 is refused; it must be" in done.stderr
    assert "ControllerError" not in done.stderr.rpartition("Traceback")[2]
    assert (tmp_path / "out.begun").read_text() == "begun\n"
