"""Tiny models of several families with random weights, saved as a user's directory would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def llama(**changes: Any) -> PreTrainedConfig:
    """Grouped-query attention, rotary positions."""
    return LlamaConfig(**(_SHAPE | {"head_dim": 8} | changes))


def qwen2(**changes: Any) -> PreTrainedConfig:
    """Biased projections, tied embeddings."""
    return Qwen2Config(**(_SHAPE | {"tie_word_embeddings": True} | changes))


def qwen3(**changes: Any) -> PreTrainedConfig:
    """Normalised queries and keys."""
    return Qwen3Config(**(_SHAPE | {"head_dim": 8} | changes))


def mistral(**changes: Any) -> PreTrainedConfig:
    """A sliding window of 24 tokens."""
    return MistralConfig(**(_SHAPE | {"head_dim": 8, "sliding_window": 24} | changes))


def granite(**changes: Any) -> PreTrainedConfig:
    """Scaled embeddings, attention, residuals and logits."""
    multipliers = {"embedding_multiplier": 12.0, "attention_multiplier": 0.25}
    multipliers |= {"residual_multiplier": 0.22, "logits_scaling": 8.0}
    return GraniteConfig(**(_SHAPE | multipliers | changes))


def gpt2(**changes: Any) -> PreTrainedConfig:
    """Learned positions, fused projections."""
    shape = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256}
    return GPT2Config(**(shape | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | changes))


def opt(**changes: Any) -> PreTrainedConfig:
    """Learned positions with an offset, biased projections."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "word_embed_proj_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "ffn_dim": 80,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return OPTConfig(**(shape | changes))


FAMILIES = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "granite": granite,
    "gpt2": gpt2,
    "opt": opt,
}


def save(directory: Path, config: PreTrainedConfig, seed: int = 0, sharpness: float = 4.0) -> Path:
    """Draw weights from `seed` and save the model in `directory`.

    `sharpness` scales the output head: a random model's logits are nearly flat, and a flat
    distribution hides mistakes that a peaked one shows.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)
    model.save_pretrained(directory)
    return directory


def blur(source: Path, directory: Path, noise: float, seed: int = 1) -> Path:
    """Save a draft that agrees with `source` often but not always. It has the same weights with relative noise."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
    model.save_pretrained(directory)
    for file in source.iterdir():
        if file.name.startswith("tokenizer") or file.suffix == ".jinja":
            (directory / file.name).write_bytes(file.read_bytes())
    return directory
