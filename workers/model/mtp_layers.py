"""Loads the layer for multi-token prediction that a target's own checkpoint has beside its decoder layers.

The layer projects the embedding of a token and the hidden state before it to one vector, runs one decoder layer of the
target's kind over it, and normalises the output for the target's head (DeepSeek-AI 2024, section 2.2). Only its tensors
are read. DeepSeek-V3 and GLM-4.5 number it after their last decoder layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from cluster.core.errors import shorten
from workers.model.formats.checkpoint import Checkpoint

_PARTS = {
    "enorm.weight": "embedding_norm",
    "hnorm.weight": "hidden_norm",
    "shared_head.norm.weight": "output_norm",
    "eh_proj.weight": "projection",
}
"""The tensors of the layer that are not those of its decoder layer."""
_COPIES = frozenset(("embed_tokens.weight", "shared_head.head.weight"))
"""Copies of the target's own embedding and head."""
_OTHER_LAYOUTS = {
    "mtp.": "the layout of Qwen3-Next and Qwen3.5",
    "model.mtp_layers.": "the layout of MiMo-7B",
    "model.mtp.": "the layout of MiMo-V2",
}
"""Prefixes of layers that are known and not computed here."""
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
    """[hidden size, 2 x hidden size]; the embedding is before the hidden state."""
    block: nn.Module
    """The decoder layer, whose attention is the function that `attention` names in `load_mtp_layer`."""
    rotary: nn.Module
    """Computes the rotations of positions."""
    output_norm: nn.Module


def load_mtp_layer(directory: Path, attention: str, dtype: torch.dtype, device: torch.device) -> MtpLayer:
    """Load the first layer for multi-token prediction of the target in a directory.

    `attention` names a function that is registered with `transformers`. Raises `ModelLoadError`.
    """
    checkpoint, config = _checkpoint(directory), _config(directory)
    names = _own_tensors(checkpoint, config)
    config = deepcopy(config)
    for key in ("first_k_dense_replace", "num_nextn_predict_layers"):
        if hasattr(config, key):
            setattr(config, key, 0)
    config.num_hidden_layers = 1
    config._attn_implementation = attention
    with torch.device("meta"):
        decoder: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention).get_decoder()
    block, norm = decoder.layers[0], type(decoder.norm)
    stored = checkpoint.tensors(list(names.values()))

    def read(name: str) -> Tensor:
        return stored[names[name]].to(device, torch.float32 if name.endswith(_FLOAT32) else dtype)

    state = _block_state(checkpoint, block, names, read)
    block.load_state_dict(state, assign=True)
    parts: dict[str, Any] = {}
    size = int(config.hidden_size)
    for name, part in _PARTS.items():
        wanted = (size, 2 * size) if part == "projection" else (size,)
        if checkpoint.sizes[names[name]] != wanted:
            checkpoint.fail(f"{names[name]} must be {list(wanted)}, not {list(checkpoint.sizes[names[name]])}")
        parts[part] = read(name)
        if part != "projection":
            module = norm(size, eps=config.rms_norm_eps)
            module.load_state_dict({"weight": parts[part]}, assign=True)
            parts[part] = module
    rotary = type(decoder.rotary_emb)(config).to(device)
    block.eval().requires_grad_(False)
    return MtpLayer(config=config, block=block, rotary=rotary, **parts)


def _checkpoint(directory: Path) -> Checkpoint:
    return Checkpoint.read(directory) or Checkpoint(directory, {})


def _config(directory: Path) -> PreTrainedConfig:
    found: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config()
    return found


def _own_tensors(checkpoint: Checkpoint, config: PreTrainedConfig) -> dict[str, str]:
    """The names in the files of the layer's tensors, by their names in the layer. Raises `ModelLoadError`."""
    prefix = f"model.layers.{config.num_hidden_layers}."
    names = {one.removeprefix(prefix): one for one in checkpoint.sizes if one.startswith(prefix)}
    if not names:
        layout = next((words for start, words in _OTHER_LAYOUTS.items() if _has(checkpoint, start)), None)
        checkpoint.fail(
            "it has no layer for multi-token prediction, which DeepSeek-V3 and GLM-4.5 store as "
            f"{prefix}*; draft.method=mtp needs one"
            if layout is None
            else f"its layers for multi-token prediction have {layout}; draft.method=mtp reads that of DeepSeek-V3 and "
            f"GLM-4.5, {prefix}*"
        )
    missing = sorted(_PARTS.keys() - names.keys())
    if missing:
        checkpoint.fail(f"its layer for multi-token prediction lacks {', '.join(prefix + one for one in missing)}")
    checkpoint.allow("quantization_config")
    return {name: stored for name, stored in names.items() if name not in _COPIES}


def _has(checkpoint: Checkpoint, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in checkpoint.sizes)


def _block_state(
    checkpoint: Checkpoint, block: nn.Module, names: Mapping[str, str], read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """The decoder layer's parameters. Checkpoints have a tensor for each expert. Raises `ModelLoadError`."""
    state: dict[str, Tensor] = {}
    used = set(_PARTS)
    for name, value in block.state_dict().items():
        sources = [[name]] if name in names else _sources(name, len(value))
        lacking = [one for group in sources for one in group if one not in names]
        if lacking:
            checkpoint.fail(f"its layer for multi-token prediction lacks {shorten(lacking[:3])}")
        used |= {one for group in sources for one in group}
        parts = [torch.cat([read(one) for one in group]) if len(group) > 1 else read(group[0]) for group in sources]
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
