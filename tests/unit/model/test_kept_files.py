"""What is kept for later starts is found again when any code changes that loads models or computes their passes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from tests.support.models import tiny
from workers.model import kept_files, verdicts
from workers.model.kept_files import code_digest, computing_files

WORKERS = Path(kept_files.__file__).parents[1]


def imported(file: Path) -> set[str]:
    """The packages and modules of `workers` that a file imports anywhere, as the parser of Python reads it."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
    return {name.split(".")[1] for name in names if name.startswith("workers.")}


def test_the_code_is_whatever_the_package_of_models_imports() -> None:
    files = computing_files()
    places = {file.relative_to(WORKERS).parts[0].removesuffix(".py") for file in files}
    assert {"model", "forward", "kv", "sampling", "ranks", "transfer"} <= places
    assert not {"draft", "verify", "serve", "distill"} & places, "these import the package of models"
    reached = {name for file in files if file.suffix == ".py" for name in imported(file)}
    assert reached <= places


@pytest.mark.parametrize("place", [
    "kv/triton/entries.py", "forward/triton/attention.py", "forward/backends/triton.py", "forward/native/decoder.c",
    "model/stored/gptq.py", "transfer.py",
])  # fmt: skip
def test_kernels_backends_and_readers_of_weights_are_among_it(place: str) -> None:
    assert WORKERS / place in computing_files()


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code in place of that of `workers`."""
    texts = {
        "model/loading.py": "from workers.forward.runner import run\n",
        "forward/runner.py": "def run():\n    from workers.kv.copies import move\n    import workers.transfer\n",
        "kv/copies.py": "",
        "kv/triton/entries.py": "a kernel",
        "transfer.py": "",
        "draft/eagle.py": "from workers.model.loading import load\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kept_files, "_WORKERS", tmp_path)
    monkeypatch.setattr(verdicts, "code_digest", code_digest.__wrapped__)
    return tmp_path


@pytest.mark.parametrize(("changed", "is_found_again"), [("kv/triton/entries.py", True), ("draft/eagle.py", False)])
def test_a_changed_kernel_forgets_the_verdict_and_a_changed_drafter_does_not(
    changed: str, is_found_again: bool, small: Path
) -> None:
    directory = tiny.save(small / "weights", tiny.llama())
    section = ModelSection(path=str(directory), compile_directory=str(small / "code"))
    before = verdicts.verdict_file(section, 1, torch.device("cpu"))
    (small / changed).write_text("other code")
    assert before is not None
    assert (verdicts.verdict_file(section, 1, torch.device("cpu")) != before) is is_found_again


def test_code_under_another_name_is_other_code(small: Path) -> None:
    before = code_digest.__wrapped__()
    (small / "kv/triton/entries.py").rename(small / "kv/triton/others.py")
    assert code_digest.__wrapped__() != before
