"""Checkpoints with quantized weights are read without their libraries, or refused with an error that names one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError, ModelLoadError
from tests.support.models import quantized, tiny
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model import loading
from workers.model.loading import load_model
from workers.model.model_files import resolve_model_directory

TOKENS = tuple(range(3, 30))


def compressed(form: str, bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


CHECKPOINTS = {
    "gptq 4 bits": (quantized.gptq(4, 16), {"quant_method": "gptq", "bits": 4, "group_size": 16}),
    "gptq 8 bits": (quantized.gptq(8, 48), {"quant_method": "gptq", "bits": 8, "group_size": 48}),
    "gptq in activation order": (
        quantized.gptq(4, 16, shuffled=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
    ),
    "gptq v2": (
        quantized.gptq(4, 16, version=2),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (quantized.awq(16), {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "compressed-tensors int8": (quantized.compressed_int8, compressed("int-quantized", 8)),
    "compressed-tensors packed": (quantized.compressed_packed(4, 16), compressed("pack-quantized", 4)),
    "fp8": (quantized.fp8(32, 32), {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "bitsandbytes": (quantized.nf4(16), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("plain"), tiny.llama(), sharpness=2.0)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_quantized_checkpoint_answers_as_its_dequantized_weights(name: str, source: Path, tmp_path: Path) -> None:
    quantize, settings = CHECKPOINTS[name]
    plain = quantized.save(source, tmp_path / "model", quantize, settings)
    directory = resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")

    stored = load_file(directory / "model.safetensors")
    assert stored.keys() == plain.keys()
    for key, weight in plain.items():
        torch.testing.assert_close(stored[key], weight, rtol=1e-6, atol=1e-7)

    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    reference.load_state_dict(plain)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=20)
    table = pool.new_table()
    pool.reserve(table, len(TOKENS))
    row = ForwardRow(table, TOKENS, select=tuple(range(len(TOKENS))))
    torch.testing.assert_close(ModelRunner(model, pool).forward([row]), expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_is_converted_once_and_again_when_it_changes(source: Path, tmp_path: Path) -> None:
    quantized.save(source, tmp_path / "model", *CHECKPOINTS["compressed-tensors int8"])
    first = resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    (tmp_path / "model" / "config.json").touch()
    assert resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache") != first


def test_the_parts_of_a_weight_may_be_in_different_files(source: Path, tmp_path: Path) -> None:
    plain = quantized.save(source, tmp_path / "model", *CHECKPOINTS["gptq 4 bits"])
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    halves = sorted(tensors)[::2], sorted(tensors)[1::2]
    for number, names in enumerate(halves, start=1):
        save_file({name: tensors[name] for name in names}, file.with_name(f"model-0000{number}-of-00002.safetensors"))
    directory = resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for key, weight in plain.items():
        torch.testing.assert_close(module.state_dict()[key], weight, rtol=1e-6, atol=1e-7)


def test_the_last_group_of_a_matrix_may_have_fewer_inputs(source: Path, tmp_path: Path) -> None:
    """Groups of 32 inputs of 48 or 80, without the numbers of their groups (`g_idx`)."""

    def quantize(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts, plain = quantized.gptq(4, 32)(weight)
        del parts["g_idx"]
        return parts, plain

    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    plain = quantized.save(source, tmp_path / "model", quantize, settings)
    directory = resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")
    stored = load_file(directory / "model.safetensors")
    for key, weight in plain.items():
        torch.testing.assert_close(stored[key], weight, rtol=1e-6, atol=1e-7)


def test_masks_of_old_checkpoints_are_not_taken_for_weights(source: Path, tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    quantized.save(source, tmp_path / "model", quantized.gptq(4, 32), settings)
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}, file)
    directory = resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")
    assert "h.0.attn.bias" in load_file(directory / "model.safetensors")


def test_numbers_whose_scales_are_not_read_are_refused(source: Path, tmp_path: Path) -> None:
    """FBGEMM stores the experts of Llama 4 in one tensor."""
    quantized.save(source, tmp_path / "model", quantized.fp8(1, 0, "weight_scale"), {"quant_method": "fbgemm_fp8"})
    file = tmp_path / "model" / "model.safetensors"
    name = "model.layers.1.feed_forward.experts.gate_up_proj"
    experts = {name: torch.ones(2, 4, 8).to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(2, 1, 8)}
    save_file(load_file(file) | experts, file)
    with pytest.raises(ModelLoadError, match=rf"'{name}' is torch\.float8_e4m3fn and has no scale that is read"):
        resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_all_chat_templates_are_beside_the_dequantized_weights(source: Path, tmp_path: Path) -> None:
    quantized.save(source, tmp_path / "model", *CHECKPOINTS["awq"])
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.json"):
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text("{}")
        directory = resolve_model_directory(str(tmp_path / "model"), tmp_path / f"cache of {Path(name).name}")
        assert (directory / name).read_text() == "{}"


def test_a_file_that_is_missing_is_not_called_a_full_cache(source: Path, tmp_path: Path) -> None:
    """In caches of a hub, files are links to others, which may be deleted."""
    directory = tmp_path / "model"
    quantized.save(source, directory, *CHECKPOINTS["awq"])
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").symlink_to(tmp_path / "deleted")
    with pytest.raises(ModelLoadError, match=r"the model cannot be converted: .*tool_use\.jinja") as refused:
        resolve_model_directory(str(directory), tmp_path / "cache")
    assert "PILOTFISH_CACHE_DIR" not in str(refused.value)


def test_weights_of_five_bits_are_refused_with_the_bits_that_are_read(source: Path, tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 5, "group_size": 16}
    quantized.save(source, tmp_path / "model", quantized.gptq(4, 16), settings)
    with pytest.raises(
        ModelLoadError, match=r"weights of 'gptq' are refused: .*bits is 5; it must be 2 or 3 or 4 or 8"
    ):
        resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ("gptq", "gptqmodel optimum"),
        ("awq", "gptqmodel"),
        ("compressed-tensors", "compressed-tensors"),
        ("bitsandbytes", "bitsandbytes"),
    ],
)
def test_a_missing_library_is_named_with_the_format_and_the_model(
    method: str, package: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"quant_method": method, "bits": 4, "load_in_8bit": True, "config_groups": {}}
    quantized.save(source, tmp_path / "model", quantized.compressed_int8, settings)

    def missing(*_: object, **__: object) -> None:
        raise ImportError("a library is missing")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", missing)
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelSection(path=str(tmp_path / "model"), device="cpu"))
    assert f"quantized as '{method}'" in str(caught.value)
    assert f"pip install {package}`" in str(caught.value)
    assert str(tmp_path / "model") in str(caught.value)


def test_a_method_that_is_no_name_is_refused_as_others_are(source: Path, tmp_path: Path) -> None:
    quantized.save(source, tmp_path / "model", quantized.compressed_int8, {"quant_method": ["gptq"]})
    directory = resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")
    with pytest.raises(ModelLoadError, match="model type 'llama' is refused"):
        load_model(ModelSection(path=str(directory), device="cpu"))


def test_a_method_that_is_not_read_is_refused_with_its_name(source: Path, tmp_path: Path) -> None:
    quantized.save(source, tmp_path / "model", quantized.compressed_int8, {"quant_method": "quanto", "weights": "int8"})
    directory = resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")
    with pytest.raises(ModelLoadError, match="quanto"):
        load_model(ModelSection(path=str(directory), device="cpu"))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantizing_is_refused_on_cuda(
    quantization: Literal["int8", "int4"], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "choose_device", lambda *_: torch.device("cuda"))
    with pytest.raises(ConfigurationError, match=f"quantization: {quantization} is refused on CUDA"):
        load_model(ModelSection(path=str(source), quantization=quantization))
