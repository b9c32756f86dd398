"""Two processes of Ray Train train what one process trains, and go on from the last checkpoint when one is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.distill.conftest import LENGTH, PROMPT
from workers.distill.answers import Answer, AnswerFile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs ray[train]"),
]

STEPS, DIES = 10, 8
BOUND = 1e-4
"""Largest difference of two weights. A training moves them by up to 1e-2."""
_EAGER = {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def words(directory: Path, answers: tuple[Answer, ...], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small training on the answers of the tiny target."""
    work = tmp_path_factory.mktemp("texts")
    (work / "prompts.jsonl").write_text(json.dumps({"question": "What is one?"}) + "\n")
    with AnswerFile(work / "answers.jsonl") as file:
        for answer in answers:
            file.append(answer)
    small = {"slots": 3, "layers": 2, "rank": 8, "blocks": 8, "batch-rows": 4, "max-length": 2 * (PROMPT + LENGTH)}
    given = {"target": directory, "prompts": work / "prompts.jsonl", "answers": work / "answers.jsonl"}
    settings = {"write-seconds": 0, "steps": STEPS, "device": "cpu", "parts": 2, "max-tokens": LENGTH} | small | given
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def trained(words: list[str], out: Path, workers: int, dies: int = 0) -> dict[str, torch.Tensor]:
    """The weights after a training in so many processes."""
    given = [*words, "--out", str(out), "--workers", str(workers)]
    command = [sys.executable, "-m", "tests.unit.distill.dspark.training_in_processes", json.dumps(given), str(dies)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | _EAGER)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    weights = load_file(out / "model.safetensors")
    return {name: value.float() for name, value in weights.items()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def test_processes_train_what_one_trains_and_survive_a_kill(words: list[str], tmp_path: Path) -> None:
    """The optimizer is AdamW, which moves weights by about the learning rate, however small a gradient."""
    alone = trained(words, tmp_path / "alone", 1)
    killed = trained(words, tmp_path / "killed", 2, dies=DIES)

    assert Path(f"{tmp_path / 'killed'}.died").exists()
    assert difference(alone, killed) <= BOUND
