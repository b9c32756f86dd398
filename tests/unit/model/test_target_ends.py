"""The final norm that a draft shares with its target is an RMS norm, or none is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from cluster.core.errors import ModelLoadError
from tests.support.models import tiny
from tests.zoo.configs import tiny_config
from workers.model.draft_card import DraftDescription
from workers.model.drafting.ends import rms_norm
from workers.model.drafting.files import load_ends
from workers.model.target_ends import outline, read_config, read_shared_ends


@pytest.mark.parametrize(
    ("family", "norm", "offset"),
    [
        ("llama", "model.norm", 0.0),
        ("granitemoehybrid", "model.norm", 0.0),
        ("gemma", None, 0.0),
        ("qwen3_next", "model.norm", 1.0),
        ("qwen3_5_text", "model.norm", 1.0),
        ("minimax_m3_vl_text", "model.norm", 1.0),
        ("gpt2", None, 0.0),
        ("olmo", None, 0.0),
    ],
)
def test_a_norm_that_multiplies_by_one_plus_its_weight_says_so(family: str, norm: str | None, offset: float) -> None:
    found = outline(tiny_config(family))
    assert (found.norm, found.norm_offset) == (norm, offset)


@pytest.mark.parametrize("family", ["minimax_m3_vl_text", "llama", "qwen3_next"])
def test_the_norm_of_a_draft_computes_what_the_norm_of_its_target_does(family: str) -> None:
    config = tiny_config(family)
    found, model = outline(config), AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert found.norm is not None
    norm = model.get_submodule(found.norm)
    torch.nn.init.uniform_(norm.weight)
    hidden = torch.randn(3, config.hidden_size)
    with torch.inference_mode():
        expected = norm(hidden)
    torch.testing.assert_close(rms_norm(hidden, norm.weight + found.norm_offset, config.rms_norm_eps), expected)


@pytest.mark.parametrize(
    ("family", "settings", "factor"),
    [
        ("llama", {}, 1.0),
        ("granite", {"logits_scaling": 16.0}, 0.0625),
        ("granitemoe", {"logits_scaling": 3.0}, 0.333333),
        ("hyperclovax", {"logits_scaling": 0.125}, 0.125),
        ("minicpm3", {"dim_model_base": 16}, 0.25),
    ],
)
def test_the_logits_of_a_draft_have_the_factor_of_its_target(
    family: str, settings: dict[str, float], factor: float, tmp_path: Path
) -> None:
    config = tiny_config(family)
    for name, value in settings.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert outline(config).logit_factor == factor
    card = DraftDescription("", config.vocab_size, config.hidden_size, (), None)
    ends, tokens = load_ends(tmp_path, card, None, torch.float32, torch.device("cpu")), torch.tensor([[4, 9, 30]])
    with torch.inference_mode():
        states, logits = model.model(tokens).last_hidden_state, model(tokens).logits
    torch.testing.assert_close(ends.logits(states), logits, rtol=1e-4, atol=1e-5)


class _NoLinearConfig(LlamaConfig):
    model_type = "no_linear_head"


class _NoLinear(LlamaForCausalLM):
    config_class = _NoLinearConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = nn.ModuleDict({"inner": nn.Linear(config.hidden_size, config.vocab_size, bias=False)})


class _FewLogitsConfig(LlamaConfig):
    model_type = "few_logits"


class _FewLogits(LlamaForCausalLM):
    config_class = _FewLogitsConfig

    def forward(self, *_: Any, **__: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=torch.ones(1, 1, 7))


@pytest.mark.parametrize(("config", "model"), [(_NoLinearConfig, _NoLinear), (_FewLogitsConfig, _FewLogits)])
def test_a_head_whose_factor_cannot_be_measured_has_none(
    config: type[LlamaConfig], model: type[LlamaForCausalLM]
) -> None:
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    found = outline(config(**tiny.llama().to_diff_dict()))
    assert found.kind is model and found.logit_factor == 1.0


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_quantized_end_is_refused(name: str, tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    card = DraftDescription("", tiny.VOCABULARY, 48, (), None)
    assert read_shared_ends(directory, card).tensors.keys() >= {("head", "weight"), ("embedding", "weight")}
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=rf"{name} is torch\.float8_e4m3fn; drafts that share it need it as float32"
    ):
        read_shared_ends(directory, card)


@pytest.mark.parametrize(
    "changes",
    [{"layer_types": 5}, {"quantization_config": 5}, {"num_attention_heads": 0}, {"hidden_size": "abc"}],
)
def test_a_configuration_with_values_of_no_use_is_refused_by_its_directory(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | changes))
    with pytest.raises(ModelLoadError, match=f"model directory '{tmp_path}': its configuration cannot be read"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "part"), [("num_hidden_layers", None), ("n_layer", None), ("num_layers", "text_config")]
)
def test_more_layers_than_the_files_have_tensors_are_refused_before_they_are_made(
    field: str, part: str | None, tmp_path: Path
) -> None:
    LlamaForCausalLM(tiny.llama()).save_pretrained(tmp_path)
    tensors = len(load_file(tmp_path / "model.safetensors"))
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())

    def read(layers: int) -> None:
        file.write_text(json.dumps(values | ({field: layers} if part is None else {part: {field: layers}})))
        read_config(tmp_path)

    read(tensors)
    message = (
        f"{field} in config.json: 3000 is refused; it must be at most {tensors}, the number of tensors in its files"
    )
    with pytest.raises(ModelLoadError, match=f"model directory '{tmp_path}': {message}"):
        read(3000)
    (tmp_path / "model.safetensors").unlink()  # `load_format: dummy` needs no weights
    read(3000)
