"""Read checkpoints with quantized weights (GPTQ, AWQ, compressed-tensors) and write them as plain ones.

The packed integers are de-quantized once, so no library of the format is needed, every device serves the model, and
it may be quantized again with `quantization: int8`. Quantization of activations, which some compressed-tensors
checkpoints ask for, is not applied: the logits are those of the de-quantized weights.

Formats: AutoGPTQ's and AutoAWQ's `qweight`, `qzeros`, `scales`, `g_idx`; compressed-tensors' `weight` or
`weight_packed` with `weight_scale`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cluster.core.errors import ModelLoadError

FORMATS = ("awq", "compressed-tensors", "gptq")
"""Values of `quantization_config.quant_method` that `dequantize` reads."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each group of eight that AWQ stores in the i-th four bits of a word."""
_PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}
_ACTIVATION_PARTS = ("input_scale", "input_zero_point", "input_global_scale")
_Parts = dict[str, torch.Tensor]


def quantization_of(directory: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a model directory, or `None` for plain weights or an unreadable configuration."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, dict) else None


def dequantize(directory: Path, destination: Path) -> None:
    """Write the model in `directory` to `destination` with plain weights, in the type of the scales.

    Raises `ModelLoadError`, which names the tensor, where the checkpoint is not what its configuration says.
    """
    settings = quantization_of(directory) or {}
    weight_map: dict[str, str] = {}
    source = _Checkpoint(directory)
    for file, names in source.files.items():
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            try:
                tensors.update(_plain(source, name, settings))
            except (KeyError, ValueError, RuntimeError, IndexError, SafetensorError) as error:
                raise ModelLoadError(f"quantized model {str(directory)!r}: tensor {name!r}: {error}") from error
        save_file(tensors, destination / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for file in directory.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model") and ".index." not in file.name:
            shutil.copy(file, destination / file.name)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (destination / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


class _Checkpoint:
    """All tensors of a directory, read one by one. The parts of a weight may be in different files."""

    def __init__(self, directory: Path) -> None:
        self.files: dict[Path, list[str]] = {}
        self._file_of: dict[str, Path] = {}
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, framework="pt") as stored:
                self.files[file] = list(stored.keys())
            self._file_of |= dict.fromkeys(self.files[file], file)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> torch.Tensor:
        """Raises `KeyError` for an unknown name."""
        with safe_open(self._file_of[name], framework="pt") as stored:
            tensor: torch.Tensor = stored.get_tensor(name)
        return tensor


def _plain(source: _Checkpoint, name: str, settings: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensor that `name` becomes: itself, a de-quantized weight, or nothing for a part of one."""
    module, _, part = name.rpartition(".")
    method = settings.get("quant_method", "")
    parts = _PARTS[method]
    first = part in ("qweight", "weight_packed") or (part == "weight" and f"{module}.weight_scale" in source)
    if first:
        names = [part, *(other for other in parts if other != part and f"{module}.{other}" in source)]
        yield f"{module}.weight", _weight({key: source.read(f"{module}.{key}") for key in names}, method, settings)
    elif part not in parts and part not in _ACTIVATION_PARTS:
        yield name, source.read(name)


def _weight(parts: _Parts, method: str, settings: dict[str, Any]) -> torch.Tensor:
    """The weight `[out, in]`, in the type of its scales."""
    read = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}[method]
    return read(parts, settings).contiguous()


def _gptq(parts: _Parts, settings: dict[str, Any]) -> torch.Tensor:
    bits = int(settings["bits"])
    words, scales = parts["qweight"], parts["scales"]  # [in * bits / 32, out], [groups, out]
    values = _unpack(words.t(), bits).t()  # [in, out]
    zeros = _unpack(parts["qzeros"], bits)[:, : scales.shape[1]]
    if settings.get("checkpoint_format", "gptq") == "gptq":
        zeros = zeros + 1  # this version stores each zero point minus one
    group = parts["g_idx"].long() if "g_idx" in parts else _groups(len(values), len(scales))
    return _scaled(values - zeros[group], scales[group]).t()


def _awq(parts: _Parts, settings: dict[str, Any]) -> torch.Tensor:
    if int(settings["bits"]) != 4 or settings.get("version", "gemm").lower() != "gemm":
        raise ValueError("AWQ weights must have 4 bits and the version gemm")
    columns = torch.tensor(_AWQ_ORDER).argsort()
    stored = (_unpack(parts[name], 4) for name in ("qweight", "qzeros"))
    values, zeros = (part.view(len(part), -1, 8)[..., columns].flatten(1) for part in stored)  # [in | groups, out]
    scales = parts["scales"]
    group = _groups(len(values), len(scales))
    return _scaled(values - zeros[group], scales[group]).t()


def _compressed(parts: _Parts, settings: dict[str, Any]) -> torch.Tensor:
    scales = parts["weight_scale"]
    if "weight" in parts:
        values, zeros = parts["weight"].float(), parts.get("weight_zero_point")
    else:
        bits = _packed_bits(settings)
        offset = 1 << (bits - 1)  # signed values are stored with it added
        rows, inputs = parts["weight_shape"].tolist()
        values = (_unpack(parts["weight_packed"], bits)[:, :inputs] - offset).float()
        zeros = parts.get("weight_zero_point")
        if zeros is not None and zeros.dtype is torch.int32:  # packed along the outputs
            zeros = _unpack(zeros.t(), bits).t()[:rows] - offset
    if scales.numel() == 1:
        return _scaled(values if zeros is None else values - zeros.flatten().float(), scales.flatten())
    scales = scales.view(len(values), -1)  # [out, groups]
    inputs = values.shape[1]
    group = parts["weight_g_idx"].long() if "weight_g_idx" in parts else _groups(inputs, scales.shape[1])
    if zeros is not None:
        values = values - zeros.view(scales.shape)[:, group].float()
    return _scaled(values, scales[:, group])


def _packed_bits(settings: dict[str, Any]) -> int:
    """Bits of packed compressed-tensors weights. All groups of layers must have the same, since tensors lack it."""
    found = {group["weights"]["num_bits"] for group in settings["config_groups"].values()}
    if len(found) != 1:
        raise ValueError(f"its groups of layers have {sorted(found)} bits; they must all have the same")
    return int(found.pop())


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers in 32-bit words `[rows, words]` → int32 `[rows, words * 32 / bits]`, lowest bits first."""
    if bits not in (2, 4, 8):
        raise ValueError(f"weights have {bits} bits; they must have 2, 4 or 8")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.to(torch.int32)[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _groups(inputs: int, groups: int) -> torch.Tensor:
    """The group of each input, int64 `[inputs]`. All groups have the same size, except for the last one."""
    return torch.arange(inputs) // -(-inputs // groups)


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (values.float() * scales.float()).to(scales.dtype)
