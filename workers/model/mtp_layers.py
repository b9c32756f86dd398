"""Loads the layer for multi-token prediction that a target's own checkpoint has beside its decoder layers.

The layer projects the embedding of a token and the hidden state before it to one vector, runs one decoder layer of the
target's kind over it, and normalises the output for the target's head (DeepSeek-AI 2024, section 2.2). Only its tensors
are read. Families store it under different names, see `LAYOUTS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from cluster.core.errors import shorten
from workers.model.formats.checkpoint import Checkpoint
from workers.model.stored.quantized_checkpoint import QuantizedCheckpoint
from workers.model.target_ends import read_config


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """The names under which a family stores such a layer."""

    families: str
    """The models that have it, for messages."""
    prefix: str
    """Begins the names of the layer's tensors. `N` stands for the number of the target's decoder layers."""
    embedding_norm: str
    """The norm of the embedding."""
    hidden_norm: str
    """The norm of the hidden state."""
    projection: str
    """The matrix that joins both."""
    output_norm: str
    """The norm after the decoder layer."""
    block: str = ""
    """Begins the names of the decoder layer's tensors, after `prefix`."""
    is_hidden_first: bool = False
    """Whether the projection takes the hidden state before the embedding."""
    copies: frozenset[str] = frozenset()
    """Copies of the target's own embedding and head."""

    @property
    def parts(self) -> dict[str, str]:
        """The parts of the layer beside its decoder layer, by the names of their tensors."""
        names = ("embedding_norm", "hidden_norm", "projection", "output_norm")
        return {f"{getattr(self, name)}.weight": name for name in names}


LAYOUTS = (
    MtpLayout(
        "DeepSeek-V3 and GLM-4.5",
        "model.layers.N.",
        *("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        copies=frozenset(("embed_tokens.weight", "shared_head.head.weight")),
    ),
    MtpLayout(
        "Qwen3-Next and Qwen3.5",
        "mtp.",
        *("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        block="layers.0.",
    ),
    MtpLayout(
        "MiMo-7B",
        "model.mtp_layers.0.",
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        is_hidden_first=True,
    ),
)
"""The layouts that are read from a target's own files."""
_OF_SPECULATORS = (
    MtpLayout(
        "speculators", "mtp_layers.0.", *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ),
)
_UNREAD_LAYOUTS = {"model.mtp.": "the layout of MiMo-V2, whose windows and sinks are not computed"}
"""Prefixes of layers that are known and not computed here."""
_HIDDEN_FIRST = "mtp_hidden_states_first"
_FIXED = {_HIDDEN_FIRST: False, "attn_output_gate": True, "output_gate_type": "swish"}
"""Keys of a decoder layer in the format of `speculators`, with the only value of each that is computed here."""
_OLDER_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "full_attention_interval")
"""Keys that `transformers` reads and stores under other names."""
_EXPERTS = re.compile(r"(?P<before>.*\.experts\.)(?P<part>gate_up_proj|down_proj)")
"""The matrices of all experts in one tensor, as `transformers` has them."""
_FLOAT32 = "e_score_correction_bias"
"""Ends the name of a bias that routes tokens to experts and is kept in float32."""


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """The layer, in evaluation mode."""

    config: PreTrainedConfig
    embedding_norm: nn.Module
    hidden_norm: nn.Module
    projection: Tensor
    """[hidden size, 2 x hidden size]; the embedding is before the hidden state, in any layout."""
    block: nn.Module
    """The decoder layer, whose attention is the function that `attention` names in `load_mtp_layer`."""
    rotary: nn.Module
    """Computes the rotations of positions."""
    output_norm: nn.Module


def load_mtp_layer(
    directory: Path, attention: str, dtype: torch.dtype, device: torch.device, draft: Path | None = None
) -> MtpLayer:
    """Load the first layer for multi-token prediction of the target in a directory, or the one of a `draft` for it.

    `attention` names a function that is registered with `transformers`. Raises `ModelLoadError`.
    """
    stored_in = draft or directory
    checkpoint = Checkpoint.read(stored_in)
    config = read_config(directory).get_text_config() if draft is None else _nested_config(checkpoint)
    quantized = _quantized(checkpoint)
    layout, names = _own_tensors(checkpoint, quantized, config, LAYOUTS if draft is None else _OF_SPECULATORS)
    parts = {part: names.pop(name) for name, part in layout.parts.items()}
    names = {name.removeprefix(layout.block): stored for name, stored in names.items()}
    config = _of_one_layer(config, attention, has_experts=any(name.startswith("mlp.experts.") for name in names))
    with torch.device("meta"):
        decoder: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention).get_decoder()
    block = decoder.layers[0]
    own = [*names.values(), *parts.values()]
    plain = [name for name in own if quantized is None or not quantized.is_quantized(name)]
    stored = checkpoint.weights(plain, mapped=True)  # of a target: they may be large

    def read(name: str) -> Tensor:
        found = stored[name] if name in stored or quantized is None else quantized.matrix(name).dequantized()
        return found.to(device, torch.float32 if name.endswith(_FLOAT32) else dtype)

    block.load_state_dict(_block_state(checkpoint, block, names, read), assign=True)
    size = int(config.hidden_size)
    found: dict[str, Any] = {}
    for part, name in parts.items():
        wanted, values = (size, 2 * size) if part == "projection" else (size,), read(name)
        if tuple(values.shape) != wanted:
            checkpoint.fail(f"{name} must be {list(wanted)}, not {list(values.shape)}")
        found[part] = values if part == "projection" else _norm(type(decoder.norm), config, values)
    if _is_hidden_first(layout, config):
        found["projection"] = found["projection"].roll(size, dims=1)
    block.eval().requires_grad_(False)
    return MtpLayer(config=config, block=block, rotary=type(decoder.rotary_emb)(config).to(device), **found)


def _is_hidden_first(layout: MtpLayout, config: PreTrainedConfig) -> bool:
    """Whether the projection takes the hidden state before the embedding; a key of the configuration may say so."""
    stated = getattr(config, _HIDDEN_FIRST, None)
    return layout.is_hidden_first if stated is None else bool(stated)


def _norm(kind: type[nn.Module], config: PreTrainedConfig, weight: Tensor) -> nn.Module:
    module: nn.Module = kind(int(config.hidden_size), eps=config.rms_norm_eps)
    module.load_state_dict({"weight": weight}, assign=True)
    return module


def _of_one_layer(config: PreTrainedConfig, attention: str, *, has_experts: bool) -> PreTrainedConfig:
    """The configuration of a model of one decoder layer, which attends to all tokens and may have experts."""
    found = deepcopy(config)
    for key in ("first_k_dense_replace", "num_nextn_predict_layers"):
        if hasattr(found, key):
            setattr(found, key, 0)
    if hasattr(found, "mlp_only_layers"):
        found.mlp_only_layers, found.decoder_sparse_step = ([] if has_experts else [0]), 1
    found.num_hidden_layers = 1
    if getattr(found, "layer_types", None):
        found.layer_types = ["full_attention"]
    found._attn_implementation = attention
    return found


def _nested_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The configuration of the decoder layer of a draft in the format of `speculators`. Raises `ModelLoadError`."""
    body = checkpoint.nested("transformer_layer_config")
    if body.model_type not in CONFIG_MAPPING:
        body.refuse("model_type", "it must be a family of transformers")
    _check_body(body, CONFIG_MAPPING[body.model_type]())
    try:
        found: PreTrainedConfig = CONFIG_MAPPING[body.model_type](**body.config).get_text_config()
    except (TypeError, ValueError) as error:
        checkpoint.fail(f"transformer_layer_config in config.json: {error}")
    return found


def _check_body(body: Checkpoint, family: PreTrainedConfig) -> None:
    """Raise `ModelLoadError` for a key that may change the arithmetic and that the family, here unset, ignores."""
    for key, value in _FIXED.items():
        body.allow(key, value)
    body.refuse_unknown_keys({*family.to_dict(), *family.attribute_map, *_OLDER_KEYS, *_FIXED})
    text = family.get_text_config()
    if text is not family and text.base_config_key:
        _check_body(body.nested(text.base_config_key), text)


def _quantized(checkpoint: Checkpoint) -> QuantizedCheckpoint | None:
    """The reader of quantized weights; `None` for plain ones. Raises `ModelLoadError` for a format that is not read."""
    if checkpoint.config.get("quantization_config") is None:
        return None
    return QuantizedCheckpoint(checkpoint.directory)


def _own_tensors(
    checkpoint: Checkpoint,
    quantized: QuantizedCheckpoint | None,
    config: PreTrainedConfig,
    layouts: Sequence[MtpLayout],
) -> tuple[MtpLayout, dict[str, str]]:
    """The layout, and the names in the files of the layer's tensors by their names in it, without scales.

    Raises `ModelLoadError`.
    """
    prefixes = {one: one.prefix.replace("N", str(config.num_hidden_layers)) for one in layouts}
    layout = next((one for one, prefix in prefixes.items() if _has(checkpoint, prefix)), None)
    if layout is None:
        unread = next((words for start, words in _UNREAD_LAYOUTS.items() if _has(checkpoint, start)), None)
        if unread is not None:
            checkpoint.fail(f"its layers for multi-token prediction have {unread}; draft.method=mtp needs another")
        known = "; ".join(f"{one.families} store it as {prefix}*" for one, prefix in prefixes.items())
        checkpoint.fail(f"it has no layer for multi-token prediction, which draft.method=mtp needs; {known}")
    prefix = prefixes[layout]
    own = [one for one in checkpoint.sizes if one.startswith(prefix)]
    if quantized is not None:
        own = [quantized.matrix_of(one) or one for one in own]
    names = {one.removeprefix(prefix): one for one in own}
    missing = sorted(layout.parts.keys() - names.keys())
    if missing:
        checkpoint.fail(f"its layer for multi-token prediction lacks {', '.join(prefix + one for one in missing)}")
    return layout, {name: stored for name, stored in names.items() if name not in layout.copies}


def _has(checkpoint: Checkpoint, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in checkpoint.sizes)


def _block_state(
    checkpoint: Checkpoint, block: nn.Module, names: Mapping[str, str], read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """The decoder layer's parameters. Checkpoints may have a tensor for each expert. Raises `ModelLoadError`."""
    state: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, value in block.state_dict().items():
        sources = [[name]] if name in names else _sources(name, len(value))
        lacking = [one for group in sources for one in group if one not in names]
        if lacking:
            checkpoint.fail(f"its layer for multi-token prediction lacks {shorten(lacking[:3])}")
        used |= {one for group in sources for one in group}
        stored = [[read(names[one]) for one in group] for group in sources]
        parts = [torch.cat(group) if len(group) > 1 else group[0] for group in stored]
        found = parts[0] if sources == [[name]] else torch.stack(parts)
        if found.shape != value.shape:
            checkpoint.fail(f"{names[sources[0][0]]}: it must give {list(value.shape)}, not {list(found.shape)}")
        state[name] = found
    strange = sorted(names.keys() - used)
    if strange:
        checkpoint.fail(f"its layer for multi-token prediction has {shorten(strange[:3])} in excess")
    return state


def _sources(name: str, count: int) -> list[list[str]]:
    """The stored tensors of a parameter: one, or for each of `count` experts those that are joined by rows."""
    match = _EXPERTS.fullmatch(name)
    if match is None:
        return [[name]]
    parts = ("gate_proj", "up_proj") if match["part"] == "gate_up_proj" else ("down_proj",)
    return [[f"{match['before']}{expert}.{part}.weight" for part in parts] for expert in range(count)]
