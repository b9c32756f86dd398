"""Tiny targets whose checkpoints have a layer for multi-token prediction, in the layout of DeepSeek-V3 and GLM-4.5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, DeepseekV3Config, Glm4MoeConfig, PreTrainedConfig

from tests.support.models import tiny

LAYERS = 2
_MOE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
FAMILIES = ("deepseek_v3", "glm4_moe")


def config(family: str, vocabulary: int = tiny.VOCABULARY) -> PreTrainedConfig:
    """The configuration of a family: latent attention and narrower values, or grouped queries."""
    if family == "deepseek_v3":
        return DeepseekV3Config(vocab_size=vocabulary, num_key_value_heads=6, **_MLA, **_MOE)
    return Glm4MoeConfig(vocab_size=vocabulary, num_key_value_heads=3, head_dim=8, **_MOE)


def add_layer(directory: Path, sureness: float = 1.0) -> None:
    """Add a random layer to a saved target: the tensors of its last decoder layer, and those around it.

    `sureness` multiplies the target's head.
    """
    count = AutoConfig.from_pretrained(directory).num_hidden_layers
    file, before, after = directory / "model.safetensors", f"model.layers.{count - 1}.", f"model.layers.{count}."
    weights, generator = load_file(file), torch.Generator().manual_seed(3)
    head = weights["lm_head.weight"] * sureness
    size = head.shape[1]

    def drawn(*shape: int) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return (1 + 0.2 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5).to(head.dtype)

    own = {name.removeprefix(before): drawn(*value.shape) for name, value in weights.items() if name.startswith(before)}
    for part in ("gate_up_proj", "down_proj"):
        for expert, joined in enumerate(own.pop(f"mlp.experts.{part}", ())):  # the public files have one for each
            names = part.split("_")[:-1] if part == "gate_up_proj" else ["down"]
            for name, matrix in zip(names, joined.chunk(len(names)), strict=True):
                own[f"mlp.experts.{expert}.{name}_proj.weight"] = matrix.contiguous()
    own |= {f"{name}.weight": drawn(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = drawn(size, 2 * size)
    own |= {
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": head.clone(),
    }
    weights["lm_head.weight"] = head
    save_file(weights | {after + name: value for name, value in own.items()}, file, metadata={"format": "pt"})
