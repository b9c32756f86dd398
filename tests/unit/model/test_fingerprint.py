"""A fingerprint names the weights, how they are computed, and the settings that are LOSSY."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ModelLoadError
from tests.support.models import tiny
from workers.forward.runner import choose_attention
from workers.kv.pool import KvPool
from workers.model.fingerprint import fingerprint, weights_digest
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration


def section(directory: Path, **values: object) -> TargetSection:
    target = {"path": str(directory), "device": "cpu", **values}
    return load_configuration({"target": target}).target


def name_of(directory: Path, **values: object) -> str:
    target = section(directory, **values)
    model = load_model(target)
    return fingerprint(target, model, choose_attention(model, KvPool(model.kv_spec, target.kv, 20)))


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
        name_of(directory, kv={"dtype": "int8"}),
    ]
    assert len({name, *others}) == 1 + len(others)
    assert name_of(directory, kv={"block_size": 8}, threads=1) == name


def test_another_attention_backend_has_another_name(tmp_path: Path) -> None:
    target = section(tiny.save(tmp_path / "one", tiny.llama()), native="off")
    model = load_model(target)
    attention = choose_attention(model, KvPool(model.kv_spec, target.kv, 20))
    assert attention is not None
    assert fingerprint(target, model, attention) != fingerprint(target, model, replace(attention, name="another"))


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


def test_the_name_says_whether_other_requests_can_change_a_bit(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "one", tiny.llama())
    code = {"compile_directory": str(tmp_path / "code")}
    names = {
        "kernels": name_of(directory, **code),
        "kernels, bfloat16": name_of(directory, dtype="bfloat16", **code),
        "kernels, fp8": name_of(directory, kv={"dtype": "fp8"}, **code),
        "modules": name_of(directory, native="off", **code),
        "modules, fp8": name_of(directory, native="off", kv={"dtype": "fp8"}, **code),
        "modules, float16": name_of(directory, dtype="float16", compile="off", **code),
    }
    assert {kind for kind, name in names.items() if name.startswith("tp1-invariant-")} == {
        "kernels",
        "kernels, bfloat16",
        "kernels, fp8",
        "modules",
        "modules, fp8",
    }


@pytest.mark.slow
def test_compiled_modules_depend_on_their_batch(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "one", tiny.llama())
    name = name_of(directory, native="off", compile="on", compile_directory=str(tmp_path / "code"))
    assert name.startswith("tp1-batched-")


def test_a_mixture_of_experts_depends_on_its_batch(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=2,
    )
    name = name_of(tiny.save(tmp_path / "moe", config), compile="off", compile_directory=str(tmp_path / "code"))
    assert name.startswith("tp1-batched-")
