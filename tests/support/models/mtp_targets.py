"""Tiny targets whose checkpoints have a layer for multi-token prediction, under the names of each family's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, DeepseekV3Config, Glm4MoeConfig, PreTrainedConfig

from tests.support.models import tiny
from tests.zoo.configs import tiny_config

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
_PARTS = ("mtp_block", "enorm", "hnorm", "post_norm", "eh_proj")
FAMILIES = ("deepseek_v3", "glm4_moe")
"""Families whose layer is numbered after the decoder layers, which `MtpModel` of `transformers` reads."""
OTHERS = ("qwen3_next", "qwen3_5_text", "mimo")
"""Families with names of their own. MiMo-7B's decoder is that of Qwen2."""
_QWEN = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "post_norm",
    "layers.0": "mtp_block",
}
_MIMO = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "post_norm",
    "": "mtp_block",
}


def names_of(family: str) -> tuple[str, dict[str, str]]:
    """Where the names of a family's layer begin, and the parts of `MtpLayer` of `transformers` by the names after it.

    The part without a name is the decoder layer.
    """
    return ("model.mtp_layers.0.", _MIMO) if family == "mimo" else ("mtp.", _QWEN)


def config(family: str, vocabulary: int = tiny.VOCABULARY) -> PreTrainedConfig:
    """The configuration of a family: latent attention and narrower values, grouped queries, or recurrent layers."""
    if family == "mimo":
        return tiny.qwen2(vocab_size=vocabulary, tie_word_embeddings=False)
    if family in OTHERS:
        found = tiny_config(family)
        found.vocab_size, found.tie_word_embeddings = vocabulary, False
        return found
    if family == "deepseek_v3":
        return DeepseekV3Config(vocab_size=vocabulary, num_key_value_heads=6, **_MLA, **_MOE)
    return Glm4MoeConfig(vocab_size=vocabulary, num_key_value_heads=3, head_dim=8, **_MOE)


def add_layer(directory: Path, sureness: float = 1.0) -> None:
    """Add a random layer to a saved target: the tensors of its last decoder layer, and those around it.

    `sureness` multiplies the target's head.
    """
    kind = AutoConfig.from_pretrained(directory)
    count, family = kind.num_hidden_layers, {"qwen2": "mimo"}.get(kind.model_type, kind.model_type)
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
    weights["lm_head.weight"] = head
    if family in OTHERS:
        weights["model.norm.weight"] = drawn(size)  # else the norm of the hidden state undoes it
        after, parts = names_of(family)
        block, *norms = ({part: name for name, part in parts.items()}[part] for part in _PARTS)
        own = {f"{block}.{name}".removeprefix("."): value for name, value in own.items()}
    else:
        norms = ["enorm", "hnorm", "shared_head.norm", "eh_proj"]
        own |= {
            "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
            "shared_head.head.weight": head.clone(),
        }
    *norms, projection = norms
    own |= {f"{name}.weight": drawn(size) for name in norms} | {f"{projection}.weight": drawn(size, 2 * size)}
    save_file(weights | {after + name: value for name, value in own.items()}, file, metadata={"format": "pt"})
