"""Tiny models of several families with random weights, saved as a user's directory would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MarianConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
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


def qwen3_moe(**changes: Any) -> PreTrainedConfig:
    """A mixture: each token takes 3 of 16 experts."""
    experts = {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return Qwen3MoeConfig(**(_SHAPE | {"head_dim": 8} | experts | changes))


def mixtral(**changes: Any) -> PreTrainedConfig:
    """A mixture: each token takes 2 of 8 experts, with weights of float32."""
    return MixtralConfig(**(_SHAPE | {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2} | changes))


def gpt_oss(**changes: Any) -> PreTrainedConfig:
    """A mixture with learned sinks, biases, and a sliding window in every other layer: 2 of 8 experts."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 24}
    return GptOssConfig(**(_SHAPE | {"head_dim": 16} | experts | changes))


def phi(**changes: Any) -> PreTrainedConfig:
    """Attention and feed-forward network beside each other, biases, partly rotated heads."""
    return PhiConfig(**(_SHAPE | changes))


def phi3(**changes: Any) -> PreTrainedConfig:
    """Fused projections to queries, keys and values, and to gates and columns."""
    return Phi3Config(**(_SHAPE | changes))


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


_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def deepseek_v3(**changes: Any) -> PreTrainedConfig:
    """Latent attention, with values narrower than keys, and a mixture of experts behind the first layer."""
    return DeepseekV3Config(**(_SHAPE | _LATENT | changes))


def deepseek_v2(**changes: Any) -> PreTrainedConfig:
    """A DeepSeek-V2: the parts of DeepSeek-V3 with other routing, and attention that ranks divide."""
    return DeepseekV2Config(**(_SHAPE | _LATENT | changes))


FAMILIES = {
    "deepseek_v3": deepseek_v3,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "granite": granite,
    "gpt2": gpt2,
    "opt": opt,
}


_SOURCED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 256,
    "init_std": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def t5(**changes: Any) -> PreTrainedConfig:
    """Relative position biases, tied embeddings, scaled logits."""
    shape = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_heads": 6}
    biases = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    ends = {"eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
    return T5Config(**(shape | biases | ends | {"initializer_factor": 0.5} | changes))


def t5_gated(**changes: Any) -> PreTrainedConfig:
    """Gated feed-forward networks, and a head of its own, as in T5 1.1 and FLAN-T5. More layers encode than decode."""
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_layers": 3, "num_decoder_layers": 2}
    return t5(**(gated | changes))


def marian(**changes: Any) -> PreTrainedConfig:
    """Sinusoidal positions, scaled embeddings, a forbidden padding token and a forced last token."""
    starts = {"decoder_start_token_id": 0, "scale_embedding": True, "activation_function": "swish"}
    return MarianConfig(**(_SOURCED | starts | changes))


def bart(**changes: Any) -> PreTrainedConfig:
    """Learned positions with an offset, a normalised embedding, a forced first token."""
    return BartConfig(**(_SOURCED | {"decoder_start_token_id": 2} | changes))


def _generation(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of the generation configuration: forced and forbidden tokens, as in the families' known models."""
    if config.model_type == "marian":
        return {"forced_eos_token_id": config.eos_token_id, "bad_words_ids": [[config.pad_token_id]]}
    if config.model_type == "bart":
        return {"forced_bos_token_id": config.bos_token_id, "forced_eos_token_id": config.eos_token_id}
    return {}


ENCODER_DECODER_FAMILIES = {"t5": t5, "t5_gated": t5_gated, "marian": marian, "bart": bart}


def _sourced_scale(config: PreTrainedConfig, name: str) -> float:
    """Factor on weights with which a random encoder-decoder model writes more than one token again and again."""
    if "shared" in name or "embed_" in name:
        return 1.0 if config.tie_word_embeddings else 4.0
    if any(part in name for part in ("fc", "wi", "wo")):
        return 12.0
    return 4.0 if config.model_type == "t5" else 1.0


def save(directory: Path, config: PreTrainedConfig, seed: int = 0, sharpness: float = 4.0) -> Path:
    """Draw weights from `seed` and save the model in `directory`.

    `sharpness` scales the output head: a random model's logits are nearly flat, and a flat
    distribution hides mistakes that a peaked one shows. Encoder-decoder models have scales of their own.
    """
    torch.manual_seed(seed)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and parameter.requires_grad:  # sinusoidal positions are fixed
                parameter.mul_(_sourced_scale(config, name) if config.is_encoder_decoder else sharpness)
        if getattr(model, "final_logits_bias", None) is not None:  # of Marian and BART
            model.final_logits_bias.normal_(std=0.5)
    model.generation_config.update(**_generation(config))
    model.save_pretrained(directory)
    return directory


def shift(directory: Path, seed: int = 2) -> Path:
    """Add random numbers to the biases and learned sinks of a saved model, which begin as zeros."""
    draw = torch.Generator().manual_seed(seed)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(("bias", "sinks"))]:
            tensors[name] = tensors[name] + 0.5 * torch.randn(tensors[name].shape, generator=draw)
        save_file(tensors, file, metadata={"format": "pt"})
    return directory


def blur(source: Path, directory: Path, noise: float, seed: int = 1) -> Path:
    """Save a draft that agrees with `source` often but not always. It has the same weights with relative noise."""
    torch.manual_seed(seed)
    kind = AutoModelForSeq2SeqLM if AutoConfig.from_pretrained(source).is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
    model.save_pretrained(directory)
    for file in source.iterdir():
        if file.name.startswith("tokenizer") or file.suffix == ".jinja":
            (directory / file.name).write_bytes(file.read_bytes())
    return directory
