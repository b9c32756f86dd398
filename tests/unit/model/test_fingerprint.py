"""A fingerprint names the weights, how they are computed, and the settings that are LOSSY."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ModelLoadError
from tests.support.models import tiny
from workers.model.fingerprint import fingerprint, weights_digest
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration


def section(directory: Path, **values: object) -> TargetSection:
    target = {"path": str(directory), "device": "cpu", **values}
    return load_configuration({"target": target}).target


def name_of(directory: Path, **values: object) -> str:
    target = section(directory, **values)
    return fingerprint(target, load_model(target))


def test_equal_targets_have_one_name_and_others_another(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "one", tiny.llama())
    name = name_of(directory)
    assert name == name_of(directory)
    assert name.startswith("tp1-")
    others = [
        name_of(directory, dtype="bfloat16"),
        name_of(directory, native="off"),
        name_of(directory, acceptance="typical"),
        name_of(directory, kv={"window": 64}),
    ]
    assert len({name, *others}) == 1 + len(others)
    assert name_of(directory, kv={"block_size": 8}, threads=1) == name


def test_any_changed_tensor_changes_the_digest(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "one", tiny.llama())
    (file,) = directory.glob("*.safetensors")
    before, tensors = weights_digest(directory), load_file(file)
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + torch.ones_like(tensor)}, file, {"format": "pt"})
        assert weights_digest(directory) != before, name
    save_file(tensors, file, {"format": "pt"})
    (directory / "tokenizer.json").write_text("{}", "utf-8")
    assert weights_digest(directory) != before


def test_a_broken_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ModelLoadError, match="header cannot be read"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little"))
    with pytest.raises(ModelLoadError, match="must be at most"):
        weights_digest(tmp_path)
