"""`pilotfish distill` for a target in AWQ: its weights stay as they are stored while it writes texts and is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy.distillation.target import LocalTarget
from deploy.models import resolve_models
from deploy.settings import load_settings
from tests.support.models import quantized
from tests.support.models.plain_generation import greedy_texts
from tests.unit.distill.conftest import Command
from workers.distill.answers import read_answers
from workers.distill.modules import module_trainer
from workers.distill.target_model import load_target
from workers.model.formats.registry import read_draft
from workers.model.model_files import end_of_sequence_ids

pytestmark = pytest.mark.slow

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
OPTIONS = {
    "layers": ("--layers", "0,1,2"),
    "heads": ("--depths", "2", "--vocabulary-size", "64"),
    "eagle": ("--vocabulary-size", "64"),
    "eagle3": ("--depths", "2", "--vocabulary-size", "64", "--batch-tokens", "256", "--taps", "1,2"),
}
"""The kinds, each with its own options. The layers are all of the target's."""
MOST = 8
"""Most tokens of an answer."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command for a target with matrices of 4 bits."""
    monkeypatch.setattr(module_trainer, "_MAX_TOKENS", MOST)
    found = Command(tmp_path, monkeypatch, initializer_range=0.15)
    found.target = quantized.save_with_tokenizer(found.target, tmp_path / "awq", quantized.awq(16), AWQ)
    return found


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_draft_learns_from_the_stored_target_and_drafts_for_it(
    kind: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    out = command.directory / "draft"
    lengths = ("--max-length", "96", "--temperatures", "0", "--max-tokens", str(MOST))
    words = command.words(out, "--kind", kind, *OPTIONS[kind], *lengths, "--steps", "2", "--set", "target.device=cpu")

    code = command.run_words(words)

    said = " ".join(capsys.readouterr().err.split())
    assert code == 0, said
    assert "weights are de-quantized" not in said
    answers = read_answers(command.work / "answers.jsonl")
    target = load_target(command.target, torch.device("cpu"))  # de-quantized
    expected = greedy_texts(target, [one.prompt for one in answers], MOST, end_of_sequence_ids(command.target))
    assert len(answers) == 20 and [one.answer for one in answers] == expected
    assert "as they are stored (awq, 4 bits)" in (out / "README.md").read_text()

    assignments = [f"target.path={command.target}", "target.kv.pool_bytes=4194304", "target.device=cpu"]
    settings = load_settings("cpu", assignments)
    served = resolve_models(settings.configuration, settings.cache_directory, lambda _: None).configuration
    assert served.target.quantization == "stored"
    found = LocalTarget(served).draft_with(out, read_draft(out).kind, [one.prompt for one in answers[:2]], MOST)
    assert found.prompts == 2
    assert found.tokens_per_step >= (2 if kind == "layers" else 1)
