"""Reads the shape of a draft's decoder layers from a Llama, Qwen2 or Qwen3 configuration. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.model.formats.checkpoint import Checkpoint
from workers.model.public_shapes import DecoderShape, RopeShape, Sizes

_FAMILIES = ("llama", "qwen2", "qwen3")
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"),
        *("mscale_all_dim", "truncate"),
    ),
}
"""The parameters of each scaling of rotary positions whose frequencies do not depend on a text's length."""
DECODER_KEYS = frozenset(
    (
        *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "hidden_act"),
        *("sliding_window", "use_sliding_window", "layer_types", "num_attention_heads", "rope_interleaved"),
        *("is_neox_style", "partial_rotary_factor", "quantization_config"),
    )
)
"""The keys that `decoder_shape` reads and that may change the arithmetic."""


def decoder_shape(config: Checkpoint, sizes: Sizes, *, layers: int, first: str) -> DecoderShape:
    """The shape of `layers` layers.

    `sizes` are those of the tensors by their names in the files, in which `first` begins the names of the first layer.
    Raises `ModelLoadError` for a family, an activation, a scaling or a window that is not supported.
    """
    family = config.model_type
    if family not in _FAMILIES:
        config.refuse("model_type", f"it must be {', '.join(_FAMILIES)} or unset")
    config.allow("hidden_act", "silu")
    config.allow("mlp_bias", False)
    config.allow("rope_interleaved", False)
    config.allow("is_neox_style", True)
    config.allow("partial_rotary_factor", 1.0, 1)
    config.allow("quantization_config")
    if config.config.get("use_sliding_window") is not False:
        config.allow("sliding_window")
    kinds = config.config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        config.refuse("layer_types", "all layers must be full_attention")
    size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", heads)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", f"it must divide num_attention_heads, {heads}")
    width = config.count("head_dim", 128 if family == "qwen3" else max(1, size // heads))
    if width % 2:
        config.refuse("head_dim", "it must be even")
    has_bias = config.flag("attention_bias") or (family == "qwen2" and f"{first}self_attn.q_proj.bias" in sizes)
    return DecoderShape(
        hidden_size=size,
        heads=heads,
        kv_heads=kv_heads,
        head_width=width,
        intermediate_size=config.count("intermediate_size"),
        layers=layers,
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias and f"{first}self_attn.o_proj.bias" in sizes,
        has_head_norms=family == "qwen3",
    )


def _rope(config: Checkpoint) -> RopeShape:
    """The rotary positions. Without a base, it is 10000, as in the families' own configurations."""
    key = "rope_parameters" if config.config.get("rope_parameters") is not None else "rope_scaling"
    found = config.nested(key)
    theta = found.number("rope_theta", config.number("rope_theta", 10000.0))
    values: Mapping[str, Any] = found.config
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALINGS:
        config.refuse(key, f"its rope_type must be {', '.join(_SCALINGS)}")
    known = _SCALINGS[kind]
    found.allow("partial_rotary_factor", 1.0, 1)
    strange = sorted(values.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *known})
    if strange:
        config.refuse(key, f"rope_type {kind} does not know {strange[0]}")
    parameters = []
    for name in known:
        value = values.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float):
            found.refuse(name, "it must be a number")
        parameters.append((name, value))
    if kind != "default" and not any(name == "factor" for name, _ in parameters):
        config.refuse(key, "its factor must be set")
    return RopeShape(theta, kind, tuple(parameters), config.count("max_position_embeddings", 2048))
