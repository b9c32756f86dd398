"""Files that hold no whole model are seen by their headers, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from cluster.core.errors import ModelLoadError
from deploy.doctor.models import model_finding
from tests.support.models import stored_gguf, tiny
from workers.model.description import directory_fault, gguf_fault
from workers.model.model_files import resolve_model_directory

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-64])


def cut_in_half(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 100])


def write(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


FAULTS: list[tuple[Callable[[Path], object], str]] = [
    (write(b""), "an empty file"),
    (write(POINTER), "a pointer of Git LFS"),
    (write(b"PK\x03\x04 and more"), "begins with b'PK"),
    (write(b"not a model"), "begins with b'not '"),
    (write(b"GGUF"), "a damaged file: it names 8 bytes and has 4"),
    (write(b"GGUF" + b"\x09\0\0\0" + bytes(100)), "a damaged file: .*version 9"),
    (write(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 100), "a damaged file"),
    (write(b"GGUF" + b"\x03\0\0\0" + bytes(16)), "no key general.architecture"),
    (cut, "a damaged file: it names .* bytes and has"),
    (cut_in_half, "a damaged file"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    keys = {"tokenizer.ggml.tokens": [f"token {number}" for number in range(3000)]}
    stored_gguf.write(AutoModelForCausalLM.from_config(tiny.llama()), file, "llama", {}, "F32", keys=keys)
    return file.read_bytes()


def test_a_whole_file_has_no_fault(whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(whole)
    assert gguf_fault(file) is None
    assert not model_finding("target.path", str(file), tmp_path / "cache").is_problem


@pytest.mark.parametrize(("damage", "found"), FAULTS, ids=[one[1] for one in FAULTS])
def test_a_file_that_is_no_whole_gguf_file_is_refused(
    damage: Callable[[Path], object], found: str, whole: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(whole)
    damage(file)

    finding = model_finding("draft.model.path", f"{file}", tmp_path / "cache")

    assert finding.is_problem and finding.found.startswith(f"{file}: ")
    assert "GGUF file" in str(finding.remedy)
    with pytest.raises(ModelLoadError, match=rf"GGUF file .*model\.gguf': found .*{found}.*; needed .*GGUF file"):
        resolve_model_directory(str(file), tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "damage", "found", "needed"),
    [
        ("config.json", write(b""), "an empty file", "a JSON object with model_type"),
        ("config.json", write(b"{"), "a file that is not JSON", "a JSON object with model_type"),
        ("config.json", write(b"[]"), "JSON of the type list", "a JSON object with model_type"),
        ("config.json", write(b"{}"), "no model_type", "a JSON object with model_type"),
        ("config.json", Path.unlink, "no config.json", "a model directory with config.json"),
        ("model.safetensors", Path.unlink, "no .safetensors file", "a model directory with config.json"),
        ("model.safetensors", write(b""), "an empty file", "a whole safetensors file"),
        ("model.safetensors", write(POINTER), "a pointer of Git LFS", "a whole safetensors file: run `git lfs pull`"),
        ("model.safetensors", write(b"PK\x03\x04 and more"), "a file whose header", "a whole safetensors file"),
        ("model.safetensors", cut, "bytes of the", "a whole safetensors file"),
    ],
)
def test_a_directory_that_holds_no_whole_model_is_refused(
    name: str, damage: Callable[[Path], object], found: str, needed: str, tmp_path: Path
) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    assert directory_fault(directory) is None
    damage(directory / name)

    finding = model_finding("target.path", str(directory), tmp_path / "cache")

    assert finding.is_problem and found in finding.found
    assert needed in str(finding.remedy)
    with pytest.raises(ModelLoadError, match=f"found .*{found}.*; needed .*{needed}"):
        resolve_model_directory(str(directory), tmp_path / "cache")
