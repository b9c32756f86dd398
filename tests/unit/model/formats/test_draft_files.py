"""The files of drafts: code in pickles is not run, broken files are refused, and weights may be split into several."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.core.errors import ModelLoadError
from tests.support.models import public_drafts, tiny
from tests.support.models.public_drafts import DFLASH, HIDDEN, LLAMA, Tensors, write
from tests.unit.model.formats.test_refusals import EAGLE3
from workers.model.drafting.files import load_drafter
from workers.model.formats.registry import read_draft, read_weights


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=8))


class Malicious:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/nonexistent/pilotfish", "w"))


class TestFiles:
    def test_a_pickle_with_code_is_not_run(self, tmp_path: Path) -> None:
        write(tmp_path, EAGLE3, {})
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(), protocol=2))

        with pytest.raises(ModelLoadError, match=r"pytorch_model.bin cannot be read as plain tensors"):
            read_draft(tmp_path)

    @pytest.mark.parametrize(
        ("config", "tensors", "file"),
        [
            ({}, public_drafts.medusa, "medusa_lm_head.pt"),
            (LLAMA, public_drafts.eagle1, "pytorch_model.bin"),
            (DFLASH, public_drafts.block, "mask_embedding.pt"),
        ],
    )
    def test_an_archive_that_is_compressed(
        self, config: dict[str, Any], tensors: Callable[[], Tensors], file: str, target: Path, tmp_path: Path
    ) -> None:
        """`torch` would take its compressed bytes for numbers, or unpack more than there is memory for."""
        write(tmp_path, config, tensors())
        if config is not DFLASH:
            (tmp_path / "model.safetensors").unlink()
        plain = io.BytesIO()
        torch.save(torch.zeros(HIDDEN) if config is DFLASH else tensors(), plain)
        with zipfile.ZipFile(plain) as stored, zipfile.ZipFile(tmp_path / file, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in stored.namelist():
                packed.writestr(name, stored.read(name))

        with pytest.raises(
            ModelLoadError, match=rf"{file} cannot be read as plain tensors: its entries are compressed"
        ):
            load_drafter(tmp_path, target, torch.float32, torch.device("cpu"))

    @pytest.mark.parametrize(
        ("config", "tensors", "file"),
        [({}, public_drafts.medusa, "medusa_lm_head.pt"), (LLAMA, public_drafts.eagle1, "pytorch_model.bin")],
    )
    def test_a_pickle_without_a_map_of_tokens_is_read_for_sizes_and_weights_alone(
        self,
        config: dict[str, Any],
        tensors: Callable[[], Tensors],
        file: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        write(tmp_path, config, tensors(), file)
        card = read_draft(tmp_path)
        loads, load = list[Path](), torch.load

        def counted(path: Path, **options: Any) -> Any:
            loads.append(path)
            return load(path, **options)

        monkeypatch.setattr(torch, "load", counted)
        read_weights(tmp_path, card)

        assert loads == 2 * [tmp_path / file]

    def test_a_torn_file(self, tmp_path: Path) -> None:
        write(tmp_path, EAGLE3, public_drafts.eagle3())
        whole = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[:100])

        with pytest.raises(ModelLoadError, match=r"model.safetensors is no safetensors file"):
            read_draft(tmp_path)

    @pytest.mark.parametrize(
        ("file", "message"),
        [
            ("model.safetensors", r"model.safetensors is no safetensors file: its header is nested too deeply"),
            ("model.safetensors.index.json", r"model.safetensors.index.json cannot be read: maximum recursion depth"),
            ("config.json", r"vocab_size in config.json: None is refused"),
        ],
    )
    def test_json_that_is_nested_too_deeply(self, file: str, message: str, tmp_path: Path) -> None:
        write(tmp_path, EAGLE3, public_drafts.eagle3())
        if "index" in file:
            (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
        deep = 100_000 * b"["
        begin = len(deep).to_bytes(8, "little") if file == "model.safetensors" else b""
        (tmp_path / file).write_bytes(begin + deep)

        with pytest.raises(ModelLoadError, match=message):
            read_draft(tmp_path)

    def test_a_directory_of_no_known_format(self, tmp_path: Path) -> None:
        write(tmp_path, LLAMA, {"odd": torch.zeros(1)})

        with pytest.raises(
            ModelLoadError, match="its format is unknown; known ones are dflash, dspark, eagle, eagle3, hydra, medusa"
        ):
            read_draft(tmp_path)

    def test_a_draft_for_a_target_of_another_size(self, target: Path, tmp_path: Path) -> None:
        write(tmp_path / "draft", EAGLE3, public_drafts.eagle3())
        wider = tiny.save(tmp_path / "wider", tiny.llama(vocab_size=128))

        with pytest.raises(ModelLoadError, match=r"target_vocabulary_size is 96 for the draft and 128 in"):
            load_drafter(tmp_path / "draft", wider, torch.float32, torch.device("cpu"))


def test_a_draft_may_be_split_into_files(target: Path, tmp_path: Path) -> None:
    write(tmp_path, EAGLE3, public_drafts.eagle3())
    whole = load_file(tmp_path / "model.safetensors")
    expected = load_drafter(tmp_path, target, torch.float32, torch.device("cpu"))
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    save_file({name: whole[name] for name in names[:7]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: whole[name] for name in names[7:]}, tmp_path / "model-00002-of-00002.safetensors")

    found = load_drafter(tmp_path, target, torch.float32, torch.device("cpu"))

    assert torch.equal(found.ends.head, expected.ends.head)
    assert found.card == expected.card
