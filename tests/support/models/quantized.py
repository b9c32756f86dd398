"""Tiny checkpoints in the formats of quantization libraries, written without those libraries."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Quantize = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
"""From a weight `[out, in]` to its parts by name, and the dequantized weight."""


def save(
    source: Path, directory: Path, quantize: Quantize, settings: dict[str, Any], layers: str | tuple[str, ...] = "_proj"
) -> dict[str, torch.Tensor]:
    """Write the model in `source` with quantized `layers`: ends of their names. Returns the dequantized weights."""
    directory.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, values in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not (name.endswith(".weight") and module.endswith(layers)):
            tensors[name] = plain[name] = values
            continue
        parts, plain[name] = quantize(values)
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return plain


def save_with_tokenizer(source: Path, directory: Path, quantize: Quantize, settings: dict[str, Any]) -> Path:
    """Write the model in `source` as `save` does, and copy its other files. Returns the directory."""
    save(source, directory, quantize, settings)
    for file in source.iterdir():
        if not (directory / file.name).exists():
            shutil.copy(file, directory)
    return directory


def words(values: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Unsigned integers `[rows, n]` → 32-bit words `[rows, n * bits / 32]`; `order[i]` is stored in the i-th place."""
    each = 32 // bits
    missing = -values.shape[1] % each
    grouped = torch.nn.functional.pad(values.long(), (0, missing)).view(len(values), -1, each)
    if order is not None:
        grouped = grouped[..., list(order)]
    packed = (grouped << torch.arange(0, 32, bits)).sum(dim=2)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def stream(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers `[rows, n]` → 32-bit words of a row's bits in one stream, so that integers may lie in two."""
    bit = (values.long().unsqueeze(2) >> torch.arange(bits) & 1).flatten(1)
    bit = torch.nn.functional.pad(bit, (0, -bit.shape[1] % 32)).view(len(values), -1, 32)
    packed = (bit << torch.arange(32)).sum(dim=2)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def gptq(bits: int, group_size: int, *, version: int = 1, shuffled: bool = False, symmetric: bool = False) -> Quantize:
    """Groups of inputs. `shuffled` assigns inputs to groups as activation order does."""

    def quantize(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = weight.shape[1]
        group = torch.arange(inputs) // group_size
        if shuffled:
            group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(0))]
        integers, zeros, scales = (_symmetric if symmetric else _asymmetric)(weight, group, bits)
        parts = {"qweight": stream(integers, bits).t(), "qzeros": stream(zeros.t() - int(version == 1), bits)}
        parts |= {"scales": scales.t(), "g_idx": group.to(torch.int32)}
        return parts, (integers - zeros[:, group]) * scales[:, group].float()

    return quantize


def awq(group_size: int) -> Quantize:
    """Asymmetric groups of four bits, packed along the outputs."""

    def quantize(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        group = torch.arange(weight.shape[1]) // group_size
        integers, zeros, scales = _asymmetric(weight, group, 4)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {"qweight": words(integers.t(), 4, order), "qzeros": words(zeros.t(), 4, order), "scales": scales.t()}
        return parts, (integers - zeros[:, group]) * scales[:, group].float()

    return quantize


def compressed_int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """compressed-tensors `int-quantized`: symmetric, one scale per output."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    integers = (weight / scale).round().to(torch.int8)
    return {"weight": integers, "weight_scale": scale}, integers * scale


def fp8(rows: int, columns: int, scale: str = "weight_scale_inv") -> Quantize:
    """8-bit floats with a float32 scale for each block of this size, 0 for all outputs or all inputs."""

    def quantize(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        outputs, inputs = weight.shape
        row, column = torch.arange(outputs) // (rows or outputs), torch.arange(inputs) // (columns or inputs)
        largest = torch.zeros(int(row[-1]) + 1, int(column[-1]) + 1)
        for number in range(outputs):
            own = torch.zeros(largest.shape[1]).scatter_reduce(0, column, weight[number].abs(), "amax")
            largest[row[number]] = largest[row[number]].maximum(own)
        scales = largest / 448
        whole = scales[row][:, column]
        small = (weight / whole).to(torch.float8_e4m3fn)
        return {"weight": small, scale: scales.view(-1)[:1] if rows == columns == 0 else scales}, small.float() * whole

    return quantize


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def nf4(block: int, *, nested: bool = False) -> Quantize:
    """bitsandbytes: 4 bits that choose one of 16 numbers, in blocks of the flattened matrix. `nested`: 8-bit scales."""

    def quantize(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        blocks, table = weight.reshape(-1, block), torch.tensor(_NF4)
        scales = blocks.abs().amax(dim=1)
        state: dict[str, Any] = {"blocksize": block, "shape": [*weight.shape], "dtype": "float32", "quant_type": "nf4"}
        parts = {"weight.quant_map": table, "weight.absmax": scales}
        if nested:
            offset, numbers = float(scales.mean()), torch.linspace(-1, 1, 256)
            own = (scales - offset).view(-1).split(256)
            largest = torch.stack([part.abs().max() for part in own])
            shares = torch.cat([part / part.abs().max() for part in own])
            steps = (shares[:, None] - numbers).abs().argmin(dim=1)
            scales = numbers[steps] * largest[torch.arange(len(steps)) // 256] + offset
            parts |= {"weight.absmax": steps.to(torch.uint8), "weight.nested_absmax": largest}
            parts["weight.nested_quant_map"] = numbers
            state |= {"nested_blocksize": 256, "nested_offset": offset}
        codes = (blocks[..., None] / scales[:, None, None] - table).abs().argmin(dim=2).flatten()
        parts["weight"] = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None]
        stated = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*stated], dtype=torch.uint8)
        return parts, (table[codes].view(-1, block) * scales[:, None]).view(weight.shape)

    return quantize


def bitsandbytes_int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """bitsandbytes' 8 bits: the largest number of each output stands for 127."""
    largest = weight.abs().amax(dim=1)
    integers = (weight / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": integers, "SCB": largest}, integers * (largest / 127)[:, None]


def compressed_packed(
    bits: int, group_size: int, *, symmetric: bool = False, shuffled: bool = False, plain_zeros: bool = False
) -> Quantize:
    """compressed-tensors `pack-quantized`: groups of inputs. `plain_zeros` stores zero points as int8."""

    def quantize(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        group = torch.arange(weight.shape[1]) // group_size
        if shuffled:
            group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(1))]
        # The integers are unsigned and include the offset.
        integers, zeros, scales = (_symmetric if symmetric else _asymmetric)(weight, group, bits)
        parts = {"weight_packed": words(integers, bits), "weight_shape": torch.tensor(weight.shape)}
        parts["weight_scale"] = scales
        if plain_zeros:
            parts["weight_zero_point"] = (zeros - (1 << (bits - 1))).to(torch.int8)
        elif not symmetric:
            parts["weight_zero_point"] = words(zeros.t(), bits).t()
        if shuffled:
            parts["weight_g_idx"] = group.to(torch.int32)
        return parts, (integers - zeros[:, group]) * scales[:, group].float()

    return quantize


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def checkpoints(group: int, block: tuple[int, int]) -> dict[str, tuple[Quantize, dict[str, Any]]]:
    """Arguments of `save` for every format, by its name.

    A scale belongs to `group` inputs, and in FP8 to a `block` of outputs and inputs.
    """

    of_gptq = partial(gptq_settings, group_size=group)
    packed, fp8_scale, sizes = compressed_packed, "weight_scale", {"weight_block_size": [*block]}
    blocks = {"strategy": "block", "block_structure": [*block]}
    return {
        "awq": (awq(group), AWQ | {"group_size": group}),
        "gptq 4 bits": (gptq(4, group), of_gptq(4)),
        "gptq 4 bits symmetric": (gptq(4, group, symmetric=True), of_gptq(4, sym=True)),
        "gptq 4 bits v2": (gptq(4, group, version=2), of_gptq(4, checkpoint_format="gptq_v2")),
        "gptq 8 bits": (gptq(8, group), of_gptq(8)),
        "gptq 3 bits": (gptq(3, group), of_gptq(3)),
        "gptq 2 bits": (gptq(2, group), of_gptq(2)),
        "gptq in activation order": (gptq(4, group, shuffled=True), of_gptq(4, desc_act=True)),
        "compressed-tensors 4 bits": (packed(4, group), compressed_settings(4)),
        "compressed-tensors 4 bits symmetric": (packed(4, group, symmetric=True), compressed_settings(4)),
        "compressed-tensors 8 bits": (packed(8, group, symmetric=True), compressed_settings(8)),
        "compressed-tensors 8 bits plain zeros": (packed(8, group, plain_zeros=True), compressed_settings(8)),
        "compressed-tensors in activation order": (packed(4, group, shuffled=True), compressed_settings(4)),
        "compressed-tensors int8": (compressed_int8, compressed_settings(8, "int-quantized")),
        "bitsandbytes nf4": (nf4(group), NF4),
        "bitsandbytes nf4 nested": (nf4(group, nested=True), NF4),
        "bitsandbytes 8 bits": (bitsandbytes_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        "fp8 in blocks": (fp8(*block), FP8 | sizes),
        "fp8 per tensor": (fp8(0, 0), FP8 | {"weight_block_size": None}),
        "fbgemm fp8 per channel": (fp8(1, 0, fp8_scale), {"quant_method": "fbgemm_fp8"}),
        "compressed-tensors fp8 per channel": (fp8(1, 0, fp8_scale), compressed_fp8_settings()),
        "compressed-tensors fp8 per tensor": (fp8(0, 0, fp8_scale), compressed_fp8_settings(strategy="tensor")),
        "compressed-tensors fp8 in blocks": (fp8(*block, fp8_scale), compressed_fp8_settings(**blocks)),
    }


def gptq_settings(bits: int, **values: Any) -> dict[str, Any]:
    """What `config.json` says of weights of GPTQ."""
    return {"quant_method": "gptq", "bits": bits, "group_size": 32} | values


def compressed_settings(bits: int, form: str = "pack-quantized") -> dict[str, Any]:
    """What `config.json` says of whole numbers of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", "strategy": "group"}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def compressed_fp8_settings(**values: Any) -> dict[str, Any]:
    """What `config.json` says of 8-bit floats of compressed-tensors."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"} | values
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def _symmetric(weight: torch.Tensor, group: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Integers, scales and zero points of groups, with every zero point in the middle of the range."""
    middle = 1 << (bits - 1)
    members = [weight[:, group == index] for index in range(int(group.max()) + 1)]
    scales = torch.stack([part.abs().amax(dim=1) / (middle - 1) for part in members], dim=1).half()
    integers = (weight / scales[:, group] + middle).round().clamp(0, 2 * middle - 1)
    return integers, torch.full(scales.shape, float(middle)), scales


def _asymmetric(weight: torch.Tensor, group: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Integers `[out, in]`, zero points and scales `[out, groups]`."""
    most = (1 << bits) - 1
    members = [weight[:, group == index] for index in range(int(group.max()) + 1)]
    low = torch.stack([part.amin(dim=1) for part in members], dim=1).clamp(max=-1e-3)
    high = torch.stack([part.amax(dim=1) for part in members], dim=1).clamp(min=1e-3)
    scales = ((high - low) / most).half()
    zeros = (-low / scales).round().clamp(1, most)
    integers = (weight / scales[:, group] + zeros[:, group]).round().clamp(0, most)
    return integers, zeros, scales
