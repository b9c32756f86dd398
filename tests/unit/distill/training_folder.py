"""A training of EAGLE-3 or DSpark on texts of the tiny target, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from deploy.distillation import dspark, eagle3
from deploy.distillation.execute import execute
from tests.support.engines.kept_kernels import KEPT
from workers.distill.answers import Answer, AnswerFile

LAYERS, PROMPT, LENGTH, ROWS = 6, 5, 14, 24
"""Layers of the target, tokens of a prompt and of an answer, number of texts."""
STEPS = 8
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
