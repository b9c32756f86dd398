"""A converted GGUF file computes what the model computed that it was written of, whatever `transformers` reads."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Phi3Config,
    PreTrainedConfig,
    Starcoder2Config,
)

from cluster.core.errors import ModelLoadError
from tests.support.engines.stored_model import check_close
from tests.support.models import stored_gguf, tiny
from workers.model import model_files
from workers.model.model_files import end_of_sequence_ids, resolve_model_directory

TEXT = tuple((7 * index) % 90 + 3 for index in range(600))
SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LONG = {"max_position_embeddings": 16384, "head_dim": 32}
FACTORS = [1.0 + 0.25 * index for index in range(16)]
ROUNDED = torch.tensor(FACTORS)


def scaled(kind: str, theta: float = 10000.0, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | values}


def gemma3(**changes: Any) -> Gemma3TextConfig:
    window = {"head_dim": 16, "sliding_window": 24, "tie_word_embeddings": True, "query_pre_attn_scalar": 16}
    return Gemma3TextConfig(**(SIZES | window | {"num_hidden_layers": 6} | changes))


def frequencies_of_windows_and(full: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": full}


YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {"short_factor": FACTORS[:4], "long_factor": FACTORS[4:8], "original_max_position_embeddings": 256}
MODELS: dict[str, tuple[str, PreTrainedConfig, dict[str, Any]]] = {
    "plain": ("llama", tiny.llama(**SIZES), {}),
    "linear": (
        "llama",
        tiny.llama(**SIZES, **scaled("linear", factor=4.0)),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "linear by the former key": (
        "qwen2",
        tiny.qwen2(**SIZES, **scaled("linear", factor=2.0)),
        {"rope.scale_linear": 2.0},
    ),
    "yarn": (
        "qwen3",
        tiny.qwen3(**SIZES, head_dim=128, **scaled("yarn", **YARN)),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256},
    ),
    "yarn with bounds of its own": (
        "llama",
        tiny.llama(**SIZES, **scaled("yarn", **YARN, beta_fast=16.0, beta_slow=2.0)),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256}
        | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
    ),
    "llama 3.1": ("llama", tiny.llama(**SIZES | LONG, **scaled("llama3", 500000.0, factor=8.0, **LLAMA3)), {}),
    "factors of another training": (
        "llama",
        tiny.llama(
            **SIZES | LONG,
            **scaled("longrope", **LONGROPE | {"short_factor": FACTORS, "long_factor": FACTORS}, attention_factor=1.0),
        ),
        {"rope_freqs.weight": ROUNDED},
    ),
    "gemma 3 of 4 billion": (
        "gemma3",
        gemma3(rope_parameters=frequencies_of_windows_and({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0})),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma 3 of 27 billion": ("gemma3", gemma3(num_hidden_layers=62, query_pre_attn_scalar=8), {}),
    "gemma 3 without windows": (
        "gemma3",
        gemma3(layer_types=["full_attention"] * 6),
        {"attention.sliding_window": 0},
    ),
    "gemma 2 of 27 billion": (
        "gemma2",
        Gemma2Config(
            **SIZES | {"num_hidden_layers": 46, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 8},
            attn_logit_softcapping=20.0,
            final_logit_softcapping=None,
            tie_word_embeddings=True,
        ),
        {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 0.0},
    ),
    "phi 3 of 4k": ("phi3", Phi3Config(**SIZES, sliding_window=24), {}),
    "phi 4 mini": ("phi3", Phi3Config(**SIZES, **scaled("default", partial_rotary_factor=0.5)), {}),
    "phi 3 of 128k": (
        "phi3",
        Phi3Config(
            **SIZES,
            **scaled("longrope", **LONGROPE, attention_factor=1.25, partial_rotary_factor=1.0),
            original_max_position_embeddings=256,
        ),
        {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.25}
        | {"rope_factors_short.weight": ROUNDED[:4], "rope_factors_long.weight": ROUNDED[4:8]},
    ),
    "starcoder 2": ("starcoder2", Starcoder2Config(**SIZES, **scaled("default", 1e6)), {}),
}


def loaded(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def written(directory: Path, name: str, more: dict[str, Any] | None = None, **options: Any) -> tuple[Path, Any]:
    """A GGUF file with the keys that llama.cpp's converter writes, and the model that it is written of."""
    architecture, config, own = MODELS[name]
    source = tiny.save(directory / "source", config, sharpness=2.0)
    model = loaded(source)
    rotations = config.rope_parameters.get("full_attention", config.rope_parameters)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "rope.freq_base": float(rotations["rope_theta"]),
        "rope.dimension_count": int(size * rotations.get("partial_rotary_factor", 1.0)),
        "tokenizer.ggml.tokens": [f"<{token}>" for token in range(config.vocab_size)],
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }
    epsilon = getattr(config, "rms_norm_eps", None)
    if epsilon is None:
        keys["attention.layer_norm_epsilon"] = config.norm_epsilon
    else:
        keys["attention.layer_norm_rms_epsilon"] = epsilon
    if architecture.startswith("gemma"):
        keys["attention.key_length"] = size
    if getattr(config, "sliding_window", None):
        keys["attention.sliding_window"] = config.sliding_window
    if rotations["rope_type"] == "llama3":
        plain = rotations["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        keys["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq.double()
    file = directory / "model.gguf"
    stored_gguf.write(model, file, architecture, {}, "F32", keys=keys | own | (more or {}), **options)
    return file, model


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """These files have no vocabulary."""
    none = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(save_pretrained=lambda _: None))
    monkeypatch.setattr(model_files, "AutoTokenizer", none)


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_file_computes_what_the_model_did(name: str, tmp_path: Path) -> None:
    file, model = written(tmp_path, name)
    found = loaded(resolve_model_directory(str(file), tmp_path / "cache"))
    tokens = torch.tensor([TEXT])
    with torch.inference_mode():
        check_close(found(tokens).logits[0], model(tokens).logits[0])


def test_the_scaling_of_llama_is_known_by_its_factors(tmp_path: Path) -> None:
    file, model = written(tmp_path, "llama 3.1")
    found = loaded(resolve_model_directory(str(file), tmp_path / "cache"))
    assert found.config.rope_parameters == model.config.rope_parameters


def test_tokens_that_end_a_turn_end_generation(tmp_path: Path) -> None:
    ends = {f"tokenizer.ggml.{name}_token_id": token for name, token in (("eos", 5), ("eot", 7), ("eom", 5))}
    file, _ = written(tmp_path, "plain", ends)
    assert end_of_sequence_ids(resolve_model_directory(str(file), tmp_path / "cache")) == (5, 7)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a scale of attention": ({"attention.scale": 0.5}, r"llama\.attention\.scale is 0\.5; it must be 0 or unset"),
    "a scale of logits": ({"logit_scale": 8.0}, r"llama\.logit_scale is 8\.0; it must be 1 or unset"),
    "a scaling without a name here": (
        {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
        r"rope\.scaling\.type is 'longrope' without both rope_factors_short and rope_factors_long",
    ),
    "two scalings": (
        {"rope.scaling.factor": 2.0, "rope_freqs.weight": ROUNDED[:4]},
        r"rope\.scaling\.type is 'linear' beside factors of frequencies",
    ),
    "too few factors": ({"rope_freqs.weight": ROUNDED[:3]}, r"rotations have 3 and 3 factors; needed 4, all above 0"),
    "a factor of 0": ({"rope_freqs.weight": 0 * ROUNDED[:4]}, r"rotations have 4 and 4 factors; needed 4, all above 0"),
    "biases": ({"blk.1.attn_q.bias": torch.zeros(48)}, r"blk\.1\.attn_q\.bias and 0 more biases have no parameter"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_model_does_not_compute_is_refused_with_its_name(what: str, tmp_path: Path) -> None:
    more, message = REFUSED[what]
    file, _ = written(tmp_path, "plain", more)
    with pytest.raises(ModelLoadError, match=rf"model\.gguf' cannot be converted: .*{message}"):
        resolve_model_directory(str(file), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_file_whose_weights_have_other_names_is_refused(tmp_path: Path) -> None:
    """`transformers` makes a dense model of a mixture of experts whose architecture is `llama`."""
    file, _ = written(tmp_path, "plain", without="mlp.up_proj")
    wanted = re.escape("its files lack 2 of 21 parameters, as ['model.layers.0.mlp.up_proj.weight'")
    with pytest.raises(ModelLoadError, match=wanted):
        resolve_model_directory(str(file), tmp_path / "cache")
