"""Memory and arithmetic of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from cluster.core.config.model_section import ModelSection
from cluster.core.config.sections import Configuration
from cluster.core.config.target_section import TargetSection
from deploy.bench.measuring.draft_flops import count_draft_flops
from deploy.bench.measuring.results import Cost, KvLayer
from workers.kv.eight_bits import record_bytes
from workers.kv.spec import LayerShape
from workers.model.stored.quantized_checkpoint import stored_bytes
from workers.model.weight_counts import count_weights

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WITHOUT_KV = {"conv", "linear_attention", "mamba", "mlp", "moe"}
"""Names that configurations give to layers that store no keys and values."""


def configuration_cost(configuration: Configuration, grown_bytes: int = 0) -> Cost:
    """The cost of a configuration whose paths are local directories.

    Raises `ModelLoadError`, and `ConfigurationError` for a module of a wrong kind.
    """
    target = count_weights(Path(configuration.target.path))
    weights = configuration.draft.weights
    modules = [count_weights(Path(section.path)) for section in configuration.draft.modules.values()]
    draft_bytes = sum(_BYTES[configuration.target.dtype] * module.parameters for module in modules)
    flops = count_draft_flops(configuration)
    if weights is not None:
        draft = count_weights(Path(weights.path))
        draft_bytes += _weight_bytes(weights, draft.parameters)
    return Cost(
        target_bytes=_weight_bytes(configuration.target, target.parameters),
        read_bytes=_weight_bytes(configuration.target, target.parameters - target.source_parameters),
        draft_bytes=draft_bytes,
        resident_bytes=max(0, grown_bytes),
        target_flops=2.0 * target.multiply_adds,
        draft_flops=flops.proposed,
        draft_step_flops=flops.step,
        draft_committed_flops=flops.committed,
        kv_layers=kv_layers(Path(configuration.target.path), configuration.target),
    )


def kv_layers(directory: Path, section: TargetSection) -> tuple[KvLayer, ...]:
    """The keys and values of each decoder layer that attends, from the model's `config.json`.

    The sources of an encoder-decoder model, which cross-attention reads, count as its prompts.
    """
    config = AutoConfig.from_pretrained(directory).get_text_config(decoder=True)
    heads = _first(config, "decoder_attention_heads", "num_attention_heads", "num_heads")
    layers = _first(config, "decoder_layers", "num_decoder_layers", "num_hidden_layers")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
    shape = LayerShape(kv_heads, head_dim)
    if (latent := getattr(config, "kv_lora_rank", None)) is not None:
        shape = LayerShape(1, latent + config.qk_rope_head_dim, latent_dim=latent)
    token_bytes = shape.records * shape.kv_heads * shape.head_dim * _BYTES[section.dtype]
    if section.kv.dtype != "auto":
        token_bytes = shape.records * record_bytes(shape)
    sliding = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"] * layers
    own = None if section.kv.window is None else section.kv.window + section.kv.sinks
    return tuple(
        KvLayer(token_bytes, sliding if kind == "sliding_attention" else own)
        for kind in kinds
        if kind not in _WITHOUT_KV
    )


def _first(config: Any, *names: str) -> int:
    """The first of some values that the configuration has. The names differ by model family."""
    return next(int(value) for name in names if (value := getattr(config, name, None)) is not None)


def _weight_bytes(section: ModelSection, parameters: int) -> int:
    """Bytes of that many weights. Those that stay as they are stored are all counted: a decoder has no others."""
    stored = stored_bytes(Path(section.path), section.dtype) if section.quantization == "stored" else None
    return (
        stored if stored is not None else parameters * (1 if section.quantization == "int8" else _BYTES[section.dtype])
    )
