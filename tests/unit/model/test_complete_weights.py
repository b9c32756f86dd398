"""A model is loaded only where its files have all of its weights, with what their numbers mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PegasusConfig, PegasusForConditionalGeneration

from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ModelLoadError
from tests.support.engines.stored_model import TEXT, check_close, logits
from tests.support.models import quantized, tiny
from workers.distill.target_model import load_target
from workers.forward.loaded_model import LoadedModel
from workers.model.complete_weights import load_complete
from workers.model.loading import load_model
from workers.model.model_files import resolve_model_directory

LOST = "model.layers.1.mlp.up_proj.weight"


def load(directory: Path) -> LoadedModel:
    path = resolve_model_directory(str(directory), directory.parent / "cache")
    return load_model(ModelSection(path=str(path), device="cpu", native="off", compile="off"))


def change(directory: Path, lost: tuple[str, ...] = (), **more: torch.Tensor) -> None:
    """Take tensors out of the file of a model, and add others."""
    file = directory / "model.safetensors"
    tensors = {name: values for name, values in load_file(file).items() if name not in lost}
    save_file(tensors | more, file, metadata={"format": "pt"})


def test_a_parameter_that_no_file_has_is_named(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    change(directory, (LOST,))
    message = rf"its files lack 1 of 21 parameters, as \['{LOST}'\]"
    with pytest.raises(ModelLoadError, match=message):
        load(directory)
    with pytest.raises(ModelLoadError, match=message):
        load_target(directory, torch.device("cpu"))


def test_positions_that_are_computed_may_be_absent(tmp_path: Path) -> None:
    """Files of Pegasus lack them."""
    config = PegasusConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
    )  # fmt: skip
    made = PegasusForConditionalGeneration(config).eval()
    made.save_pretrained(tmp_path)
    parts = [f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")]
    before = load_file(tmp_path / "model.safetensors")
    assert set(parts) <= set(before)
    change(tmp_path, tuple(parts))
    found = load_complete(PegasusForConditionalGeneration, tmp_path)
    text = torch.tensor([[5, 6, 7, 1]])
    with torch.inference_mode():
        torch.testing.assert_close(
            found(input_ids=text, decoder_input_ids=text).logits, made(input_ids=text, decoder_input_ids=text).logits
        )
    change(tmp_path, ("model.decoder.layers.0.fc1.weight",))
    with pytest.raises(ModelLoadError, match=r"lack 1 of \d+ parameters, as \['model.decoder.layers.0.fc1.weight'\]"):
        load_complete(PegasusForConditionalGeneration, tmp_path)


def test_a_parameter_that_the_index_forgets_is_named(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    lost = {LOST: tensors.pop(LOST)}
    for number, part in enumerate((tensors, lost), 1):
        save_file(part, directory / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=rf"its files lack 1 of 21 parameters, as \['{LOST}'\]"):
        load(directory)


@pytest.mark.parametrize("settings", [{"quant_method": "modelopt", "quant_algo": "FP8"}, None])
def test_numbers_whose_scales_nobody_reads_are_refused(settings: dict[str, Any] | None, tmp_path: Path) -> None:
    """`transformers` skips methods that it does not know. Some tools write no method into `config.json` at all."""
    source = tiny.save(tmp_path / "plain", tiny.llama(), sharpness=2.0)
    quantized.save(source, tmp_path / "model", quantized.fp8(0, 0, "weight_scale"), settings or {})
    if settings is None:
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        del config["quantization_config"]
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    method = "None" if settings is None else "'modelopt'"
    with pytest.raises(
        ModelLoadError, match=rf"quant_method {method} in its configuration, scales \['model\.layers\.0"
    ):
        load(tmp_path / "model")


def test_scales_of_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "model", tiny.gpt_oss())
    name = "model.layers.0.mlp.experts.down_proj_scale"
    change(directory, **{name: torch.ones(8, 1, 48)})
    with pytest.raises(ModelLoadError, match=rf"quantized in a way that is not read .*scales \['{name}'\]"):
        load(directory)


BIAS = "model.layers.1.self_attn.q_proj.bias"


def test_a_bias_that_the_configuration_does_not_state_is_refused(tmp_path: Path) -> None:
    """The model would be computed without the bias. Some tools write biases of 0 into every layer; they pass."""
    directory = tiny.save(tmp_path / "model", tiny.llama())
    expected = logits(load(directory), TEXT)
    change(directory, **{BIAS: torch.zeros(48)})
    check_close(logits(load(directory), TEXT), expected)
    change(directory, **{BIAS: torch.ones(48)})
    with pytest.raises(ModelLoadError, match=rf"have \['{BIAS}'\], and the model of its configuration has no such"):
        load(directory)


def test_floats_of_8_bits_without_scales_are_weights(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    small = load_file(directory / "model.safetensors")[LOST].to(torch.float8_e4m3fn)
    change(directory, **{LOST: small.float()})
    expected = logits(load(directory), TEXT)
    change(directory, **{LOST: small})
    check_close(logits(load(directory), TEXT), expected)


def test_integers_without_scales_are_refused(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    change(directory, **{LOST: load_file(directory / "model.safetensors")[LOST].to(torch.int8)})
    with pytest.raises(ModelLoadError, match=rf"\['{LOST}'\] have no scales that are read; they must be float32"):
        load(directory)


def test_tensors_that_a_model_does_not_need_change_nothing(tmp_path: Path) -> None:
    """Scales of a KV cache, layers for other purposes, and the head of a model that is tied to its embedding."""
    directory = tiny.save(tmp_path / "model", tiny.qwen2())
    expected = logits(load(directory), TEXT)
    scales = {f"model.layers.0.self_attn.{name}_proj.{name}_scale": torch.ones(1) for name in "kv"}
    change(directory, **scales, **{"mtp.fc.weight": torch.ones(4, 8)})
    check_close(logits(load(directory), TEXT), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "auto"])
def test_a_training_reads_a_quantized_target_without_the_library_of_its_format(
    dtype: torch.dtype | Literal["auto"], tmp_path: Path
) -> None:
    source = tiny.save(tmp_path / "plain", tiny.llama())
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    plain = quantized.save(source, tmp_path / "model", quantized.awq(16), settings)
    found = load_target(tmp_path / "model", torch.device("cpu"), dtype)
    wanted = torch.float32 if dtype == "auto" else dtype
    for name, values in found.state_dict().items():
        torch.testing.assert_close(values, plain[name].to(wanted))
