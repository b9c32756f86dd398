"""Completes the configuration that `transformers` makes of a GGUF file: it drops most keys that change the arithmetic.

These are the scaling of rotary positions, how much of a head is rotated, the base of rotations, windows, and the scale
of attention. What the keys mean is what llama.cpp computes with them (`llama-model.cpp`, `convert_hf_to_gguf.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, dequantize, get_tensor_name_map
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from workers.model.gguf_header import GgufModel

_READ_BY_TRANSFORMERS = ("gemma4", "gpt-oss", "lfm2", "minimax-m2", "qwen35", "qwen35moe")
"""Architectures whose keys `transformers` reads, or whose configuration it knows."""
_PARTLY_ROTATED = ("nemotron", "phi3", "stablelm")
"""Architectures whose models rotate a part of each head."""
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion weights, whose attention is scaled by the hidden size of a head."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_COMPUTED: Mapping[str, Sequence[float]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.alpha"), (0, 1)),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.temperature_scale"), (0,)),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Keys of which the models of `transformers` that are made here compute these values alone."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""How Llama 3.1 and later ones scale rotations. A file has the resulting factors alone."""
_FULL, _WINDOWS = "full_attention", "sliding_attention"


def completed_settings(settings: Mapping[str, Any], parameters: Iterable[str], reader: GgufModel) -> dict[str, Any]:
    """The configuration of a model with the keys of its file that `transformers` does not read.

    `parameters` are those of the model. Raises `ValueError` for what the file has and the model does not compute.
    """
    found, file = dict(settings), _File(reader)
    if file.architecture in _READ_BY_TRANSFORMERS:
        return found
    for key, values in _COMPUTED.items():
        if key in file and file.get(key) not in values:
            raise ValueError(f"{file.architecture}.{key} is {file.get(key)}; it must be {values[-1]} or unset")
    if rotations := found.get("rope_parameters"):
        if dropped := file.biases_without(parameters, found["num_hidden_layers"]):
            raise ValueError(f"{dropped[0]} and {len(dropped) - 1} more biases have no parameter in the model")
        own = rotations.get(_FULL, rotations)  # windows have rotations of their own, without a scaling
        changed = own | _rotations(own, found, file)
        found["rope_parameters"] = _of_windows(rotations, file) | {_FULL: changed} if _FULL in rotations else changed
        if "original_max_position_embeddings" in found:
            original = changed.get("original_max_position_embeddings", found["max_position_embeddings"])
            found["original_max_position_embeddings"] = original
    for key in _CAPS:
        if key in found and key in file:
            found[key] = file.get(key) or None
    window = file.get("attention.sliding_window", 0)
    if file.architecture == "phi3":
        found["sliding_window"] = window or None
    if file.architecture == "gemma3" and not window:
        del found["sliding_window"]
        found["layer_types"] = [_FULL] * found["num_hidden_layers"]
    if file.architecture in _LARGEST_GEMMA:
        is_largest = found["num_hidden_layers"] == _LARGEST_GEMMA[file.architecture]
        found["query_pre_attn_scalar"] = _head_size(found) if not is_largest else _share_of_a_head(found)
    return found


class _File:
    """The keys of a file's architecture, and its tensors of factors."""

    def __init__(self, reader: GgufModel) -> None:
        self.architecture = str(reader.fields["general.architecture"].contents())
        self._fields, self._tensors = reader.fields, {tensor.name: tensor for tensor in reader.tensors}

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._fields

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; `default` without it."""
        field = self._fields.get(f"{self.architecture}.{key}")
        return default if field is None else field.contents()

    def biases_without(self, parameters: Iterable[str], layers: int) -> list[str]:
        """The file's biases that none of the parameters of its model takes."""
        kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        names = get_tensor_name_map(kind, layers)
        stems = (name.removesuffix(".bias") for name in parameters if name.endswith(".bias"))
        taken = {f"{names.get_name(stem)}.bias" for stem in stems}
        return sorted(name for name in self._tensors if name.endswith(".bias") and name not in taken)

    def factors(self, name: str) -> list[float] | None:
        """The numbers that divide the frequencies of rotations, by the name of their tensor."""
        tensor = self._tensors.get(f"{name}.weight")
        if tensor is None:
            return None
        numbers: list[float] = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float64).flatten().tolist()
        return numbers


def _rotations(own: Mapping[str, Any], settings: Mapping[str, Any], file: _File) -> dict[str, Any]:
    """What changes in the parameters of rotations. Raises `ValueError`."""
    found: dict[str, Any] = {}
    if (base := file.get("rope.freq_base")) is not None:
        found["rope_theta"] = float(base)
    size, width = _head_size(settings), file.get("rope.dimension_count", 0)
    if width and width != int(size * own.get("partial_rotary_factor", 1.0)):
        if file.architecture not in _PARTLY_ROTATED:
            raise ValueError(f"{file.architecture}.rope.dimension_count is {width}; it must be {size}")
        found["partial_rotary_factor"] = width / size
    return found | _scaling({**own, **found}, settings, file)


def _of_windows(rotations: Mapping[str, Any], file: _File) -> dict[str, Any]:
    """The parameters of rotations by kind of layer, with the base that the file has for windows."""
    base = file.get("rope.freq_base_swa")
    own = {} if base is None else {_WINDOWS: rotations[_WINDOWS] | {"rope_theta": float(base)}}
    return {**rotations, **own}


def _scaling(own: Mapping[str, Any], settings: Mapping[str, Any], file: _File) -> dict[str, Any]:
    """The scaling of rotations; empty if there is none. Raises `ValueError`."""
    kind = file.get("rope.scaling.type", "linear")
    factor = float(file.get("rope.scaling.factor", file.get("rope.scale_linear", 0)) or 1)
    attention = float(file.get("rope.scaling.attn_factor", 1))
    original = int(file.get("rope.scaling.original_context_length", settings["max_position_embeddings"]))
    freqs, short, long = (file.factors(f"rope_{name}") for name in ("freqs", "factors_short", "factors_long"))
    if (freqs or short or long) and (factor != 1 or kind == "yarn"):
        raise ValueError(f"rope.scaling.type is {kind!r} beside factors of frequencies; it must be unset or longrope")
    if freqs:
        return _by_factors(freqs, freqs, own, settings, attention=attention, original=original)
    if short and long:
        return _by_factors(short, long, own, settings, attention=attention, original=original)
    if short or long or kind not in ("none", "linear", "yarn"):
        raise ValueError(f"rope.scaling.type is {kind!r} without both rope_factors_short and rope_factors_long")
    if kind == "none" or factor == 1:
        return {}
    if attention != 1:
        raise ValueError(f"rope.scaling.attn_factor is {attention}; it must be unset")
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": float(file.get("rope.scaling.yarn_beta_fast", 32)),
        "beta_slow": float(file.get("rope.scaling.yarn_beta_slow", 1)),
    }


def _by_factors(
    short: list[float],
    long: list[float],
    own: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    attention: float,
    original: int,
) -> dict[str, Any]:
    """The scaling that divides each frequency by its own factor: `llama3` if it gives these, else `longrope`."""
    wanted = int(_head_size(settings) * own.get("partial_rotary_factor", 1.0)) // 2
    if len(short) != wanted or len(long) != wanted or not all(one > 0 for one in (*short, *long)):
        raise ValueError(f"rotations have {len(short)} and {len(long)} factors; needed {wanted}, all above 0")
    known: dict[str, Any] = {"rope_type": "llama3", "factor": round(max(short), 3), **_LLAMA3}
    if short == long and attention == 1 and _gives(known, short, float(own["rope_theta"])):
        return known
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _gives(scaling: Mapping[str, Any], factors: list[float], base: float) -> bool:
    """Whether a scaling divides the frequencies of this base by these factors."""
    size = 2 * len(factors)
    rotations = {**scaling, "rope_theta": base}
    sizes: dict[str, Any] = {
        "hidden_size": size,
        "head_dim": size,
        "num_attention_heads": 1,
        "max_position_embeddings": 1 << 20,
    }
    config = LlamaConfig(**sizes, rope_parameters=rotations)
    steps = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].double()
    plain = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return torch.allclose(plain / steps, torch.tensor(factors, dtype=torch.float64), rtol=1e-4)


def _head_size(settings: Mapping[str, Any]) -> int:
    """Elements of a head."""
    return int(settings.get("head_dim") or _share_of_a_head(settings))


def _share_of_a_head(settings: Mapping[str, Any]) -> int:
    """The hidden size divided by the number of heads."""
    return int(settings["hidden_size"] // settings["num_attention_heads"])
