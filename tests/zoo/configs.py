"""Tiny configurations of every architecture, made from the defaults of its configuration class.

Sizes are known by their names, which families share. Windows, chunks and other bounds are so short that a sequence of
some dozens of tokens crosses them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

VOCABULARY = 96
CONTEXT = 128
LAYERS = 4

_SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*|n_vocab", VOCABULARY),
    (r"(hidden_size|d_model|n_embd|n_embed|embed_dim|emb_dim|word_embed_proj_dim|embedding_size|dim|model_dim)", 64),
    (r"(text_config_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length)", CONTEXT),
    (r"max_(source|target|encoder|decoder)_positions?(_embeddings)?", CONTEXT),
    (r"(num_(hidden|encoder|decoder|sparse_encoder|sparse_decoder)?_?layers|n_layers?|(en|de)coder_layers)", LAYERS),
    (r"(num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|num_query_heads)", 4),
    (r"(num_key_value_heads|n_kv_heads|num_kv_heads|num_key_value_groups)", 2),
    (r"(global_)?head_dim|d_kv|attention_head_dim", 16),
    (
        r"(intermediate_size|ffn_dim|(en|de)coder_ffn_dim|d_ff|n_inner|inner_dim|ffn_hidden_size|dense_intermediate_size)",
        96,
    ),
    (r"(moe|expert|shared_expert|shared|routed_expert).*(intermediate|ffn|hidden)_?(size|dim)?", 48),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts|num_routed_experts)", 8),
    (r"(num_experts_per_tok|moe_topk|moe_k|num_selected_experts|top_k_experts|moe_top_k)", 2),
    (r"(n_group|topk_group)", 1),
    (r"n_shared_experts|num_shared_experts", 1),
    (r"q_lora_rank", 24),
    (r"kv_lora_rank", 16),
    (r"qk_nope_head_dim", 16),
    (r"qk_rope_head_dim", 8),
    (r"v_head_dim", 12),
    (r"sliding_window|attention_window|window_size|local_window_size", 8),
    (r"attention_chunk_size", 32),
    (r"floor_scale", 32),
    (r"original_max_position_embeddings", 32),
    (r"first_k_dense_replace", 1),
    (r"(linear_)?num_(key|value)_heads|linear_num_key_heads|linear_num_value_heads", 2),
    (r"linear_(key|value)_head_dim|head_size", 16),
    (r"mamba_(n|num)_heads", 4),
    (r"mamba_(d_)?head(_dim)?", 32),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_d_ssm", 16),
    (r"mamba_n_groups|n_groups", 1),
    (r"(lru_width|mamba_intermediate)", 64),
    (r".*_token_id", 0),
)
"""Pattern of a field's whole name, and its value. The first that matches holds."""
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
_DERIVED = ("num_key_value_heads", "head_dim", "n_inner")
"""Sizes that many classes derive from others where they are not set."""
_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
_PAIR = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
_ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "DbrxAttentionConfig": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
    "DbrxFFNConfig": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 48},
    "bailing_hybrid": _ALTERNATING,
    "bamba": {"attn_layer_indices": [1, 3]},
    "bloom": {"seq_length": CONTEXT},
    "codegen": {"rotary_dim": 8, "n_head": 8},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROTATION)},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "encoder-decoder": {"encoder": {"is_decoder": False}, "decoder": {"add_cross_attention": True}},
    "gemma3n_text": _PAIR,
    "gemma4_assistant_text": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _ALTERNATING,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _ALTERNATING,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "phi3": {"sliding_window": None},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields of single families whose sizes depend on each other in a way of their own."""


def architectures() -> dict[str, bool]:
    """Model types of `transformers` that write text, and whether they have an encoder."""
    causal = dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, False)
    return causal | dict.fromkeys(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, True)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The tiny configuration of a model type. Raises whatever its class raises for these sizes."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**_fields(kind, model_type))


def _fields(kind: type[PreTrainedConfig], model_type: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = _size(field.name, field.default)
        if value is not None and field.name not in kind.sub_configs:
            fields[field.name] = value
    if "kv_lora_rank" in fields:  # every head of multi-head latent attention has keys of its own
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    usual = kind() if kind.sub_configs else None
    for name in kind.sub_configs:
        inner = getattr(usual, name, None)
        if isinstance(inner, PreTrainedConfig):
            fields[name] = _fields(type(inner), inner.model_type)
    own = _OWN.get(model_type) or _OWN.get(kind.__name__, {})
    return fields | {
        name: {**fields[name], **value} if name in kind.sub_configs else value for name, value in own.items()
    }


def _size(name: str, default: Any) -> Any:
    if name in _TOKENS:
        return _TOKENS[name]
    if name == "is_decoder":  # architectures of encoders write text if this is set
        return True
    is_size = isinstance(default, int) and not isinstance(default, bool)
    return _matched(name) if is_size or default is dataclasses.MISSING or name in _DERIVED else None


def _matched(name: str) -> Any:
    return next((value for pattern, value in _SIZES if re.fullmatch(pattern, name)), None)
