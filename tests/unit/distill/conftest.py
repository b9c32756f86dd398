"""A tiny target of six layers and texts that it wrote, and the command `pilotfish distill` for another tiny target."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from deploy import cli
from tests.support.models import tiny, tiny_tokenizer
from tests.support.models.plain_generation import greedy_texts
from tests.unit.distill.training_folder import KINDS, LAYERS, LENGTH, PROMPT, ROWS, Folder
from workers.distill.answers import Answer
from workers.distill.target_model import load_target


@pytest.fixture(scope="package")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with large weights, so that the target's distributions are not nearly uniform."""
    config = tiny.llama(num_hidden_layers=LAYERS, tie_word_embeddings=True, initializer_range=0.15)
    return tiny.save(tmp_path_factory.mktemp("target"), config)


@pytest.fixture(scope="package")
def target(directory: Path) -> PreTrainedModel:
    return load_target(directory, torch.device("cpu"))


@pytest.fixture(scope="package")
def answers(target: PreTrainedModel) -> tuple[Answer, ...]:
    """Greedy ones."""
    prompts = torch.randint(3, tiny.VOCABULARY, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    written = greedy_texts(target, prompts, LENGTH)
    return tuple(
        Answer(f"prompts:{row}", "", 0.0, False, tuple(prompt), answer)
        for row, (prompt, answer) in enumerate(zip(prompts, written, strict=True))
    )


@pytest.fixture(params=sorted(KINDS))
def folders(
    request: pytest.FixtureRequest, tmp_path: Path, directory: Path, answers: tuple[Answer, ...]
) -> Callable[[str], Folder]:
    """Makes a folder by name; all are of one kind."""
    return lambda name: Folder(request.param, tmp_path / name, directory, answers)


_SERVED = {"vocab_size": 320, "num_hidden_layers": 3, "head_dim": 8, "tie_word_embeddings": True}


class Command:
    """`pilotfish distill` for a tiny target, with prompts in `questions.jsonl`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **shape: object) -> None:
        self.directory, self.work = directory, directory / "work"
        self._monkeypatch = monkeypatch
        self.target = tiny_tokenizer.byte_level(tiny.save(directory / "target", tiny.llama(**(_SERVED | shape))))
        template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        (self.target / "chat_template.jinja").write_text(template)
        self.write("questions", [{"question": f"What is {number} and {number}?"} for number in range(20)])

    def write(self, name: str, rows: Sequence[Mapping[str, object]]) -> Path:
        """Write a file of prompts."""
        file = self.directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    def words(self, out: Path, *more: str) -> list[str]:
        """The words of the command after its name."""
        words = ["--set", f"target.path={self.target}", "--set", "target.served_name=tiny"]
        words += ["--set", "target.kv.pool_bytes=4194304", "--answer-tokens", "240", "--max-tokens", "8"]
        words += ["--prompts", str(self.directory / "questions.jsonl"), "--out", str(out), "--work", str(self.work)]
        return [*words, "--held-out", "3", "--precision", "float32", "--device", "cpu", *more]

    def run_words(self, words: Sequence[str]) -> int:
        """Run the command. Returns its exit code."""
        self._monkeypatch.setattr(sys, "argv", ["pilotfish", "distill", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)
