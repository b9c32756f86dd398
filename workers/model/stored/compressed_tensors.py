"""compressed-tensors checkpoints: integers of 2, 4 or 8 bits in groups or per channel, packed or as int8, or FP8.

`pack-quantized`: `weight_packed` int32 `[out, in * bits / 32]`, `weight_shape` `[2]`. `int-quantized`: `weight`
int8 `[out, in]`. Both have `weight_scale` `[out, groups]` (or `[out]`, or one for all), and perhaps `weight_g_idx`
`[in]` and `weight_zero_point` (int8 of the scales' shape, or int32 words packed along the outputs). A weight is
scale * (integer - zero); packed integers have half of their range added. `float-quantized` is FP8 as in `fp8.py`.
Quantization of activations, which a checkpoint may ask for, is not applied: the logits are those of the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from workers.forward.weights.base import Storage
from workers.forward.weights.gathered import gathered_groups
from workers.forward.weights.int8 import Int8Storage
from workers.forward.weights.integers import group_storage, groups_in_order, groups_of_integers, unpacked
from workers.model.stored.fp8 import Fp8
from workers.model.stored.parts import Parts, QuantizedFormat, Region, own_groups, scales_of, two_sizes, words

_BITS = (2, 4, 8)
_FORMATS = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float"}
"""The type of a format's numbers."""


def compressed_tensors(settings: Mapping[str, Any]) -> QuantizedFormat:
    """The format of one checkpoint. Raises `ValueError` for settings that are not read."""
    stored = settings.get("format")
    if not isinstance(stored, str) or stored not in _FORMATS:
        raise ValueError(f"format is {stored!r}; it must be {' or '.join(_FORMATS)}")
    for field in ("transform_config", "sparsity_config"):
        given = settings.get(field)
        if given and (not isinstance(given, dict) or given.get("format") != "dense"):
            raise ValueError(f"{field} is set; it must be empty")
    schemes = settings.get("config_groups")
    if not isinstance(schemes, dict) or not schemes:
        raise ValueError("config_groups is empty; it must have the bits of the weights")
    kind = _FORMATS[stored]
    found = [_weights(name, scheme, kind) for name, scheme in schemes.items()]
    if kind == "int":
        return CompressedTensors({int(weights["num_bits"]) for weights in found})
    blocks = [weights.get("block_structure") for weights in found]
    if any(block != blocks[0] for block in blocks):
        raise ValueError(f"config_groups have block_structure {blocks}; they must all have the same")
    return Fp8({"weight_block_size": blocks[0]})


def _weights(name: str, scheme: Any, kind: str) -> Mapping[str, Any]:
    """What a group of layers says about its weights."""
    weights = scheme.get("weights") if isinstance(scheme, dict) else None
    own: Mapping[str, Any] = weights if isinstance(weights, dict) else {}
    bits, found = own.get("num_bits"), own.get("type", "int")
    allowed = _BITS if kind == "int" else (8,)
    if found != kind or bits not in allowed:
        raise ValueError(
            f"config_groups.{name}.weights has {bits!r} bits of type {found!r}; "
            f"it must have {' or '.join(map(str, allowed))} of {kind}"
        )
    return own


class CompressedTensors:
    """Integers, packed or as int8."""

    parts = frozenset(
        {"weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"}
    ) | frozenset({"weight", "input_scale", "input_zero_point", "input_global_scale"})
    scales = ("weight_scale",)

    def __init__(self, bits: set[int]) -> None:
        """`bits` are those of the groups of layers."""
        self._bits = bits

    def is_quantized(self, names: Collection[str]) -> bool:
        """Whether a layer has a scale."""
        return "weight_packed" in names or {"weight", "weight_scale"}.issubset(names)

    def shape(self, parts: Parts) -> tuple[int, int]:
        """Outputs and inputs of the matrix."""
        if "weight_packed" not in parts:
            given = [*parts.get("weight").shape]
        else:
            given = parts.checked("weight_shape", (torch.int32, torch.int64), (2,)).tolist()
        return two_sizes("the weight's shape", given)

    def storage(self, parts: Parts, region: Region) -> Storage:
        """A region of a matrix."""
        shape = self.shape(parts)
        inputs, bits = shape[1], self._packed_bits(parts, shape)
        scales = scales_of(parts, "weight_scale", shape)
        size = -(-inputs // scales.shape[1])
        in_order, own = groups_in_order(inputs, scales.shape[1]), slice(0, scales.shape[1])
        group_of = in_order
        is_cut = (region.inputs.start, region.inputs.stop) != (0, inputs)
        if "weight_g_idx" in parts:
            given = parts.checked("weight_g_idx", (torch.int32, torch.int64), (inputs,)).long()
            group_of = self._activation_order(given, in_order)
        elif inputs % scales.shape[1]:
            raise ValueError(
                f"weight_scale has {scales.shape[1]} groups of {inputs} inputs; their number must divide the inputs"
            )
        is_gathered = is_cut and not torch.equal(group_of, in_order)
        if is_cut and scales.shape[1] > 1 and not is_gathered:
            own = own_groups(region.inputs, inputs, size)
        group_of = group_of[region.inputs] - own.start
        mine = scales[region.outputs, own]
        zeros = self._zeros(parts, scales, bits, region.outputs)
        zeros = None if zeros is None else zeros[:, own]
        if "weight_packed" in parts:
            columns, of_word = words(region.inputs, bits)
            packed = parts.get("weight_packed")[region.outputs, columns]
            packed = packed.clone(memory_format=torch.contiguous_format)
            if is_gathered:
                return gathered_groups(unpacked(packed, bits)[:, of_word], bits, mine, zeros, group_of)
            if of_word.start:
                integers = unpacked(packed, bits)[:, of_word].contiguous()
                return groups_of_integers(integers, bits, mine, zeros, group_of)
            return group_storage(packed, bits, mine, zeros, group_of)
        integers = parts.checked("weight", (torch.int8,), shape)[region.outputs, region.inputs]
        if zeros is None and mine.shape[1] == 1:
            return Int8Storage(integers.clone(), mine.flatten().clone())
        make = gathered_groups if is_gathered else groups_of_integers
        return make(integers.view(torch.uint8) ^ 128, 8, mine, zeros, group_of)

    @staticmethod
    def _activation_order(given: torch.Tensor, in_order: torch.Tensor) -> torch.Tensor:
        """The group of each input. Without an order, all are −1."""
        if bool((given == -1).all()):
            return in_order
        most = int(in_order[-1])
        if int(given.min()) < 0 or int(given.max()) > most:
            raise ValueError(f"weight_g_idx has {int(given.min())} to {int(given.max())}; it must have 0 to {most}")
        return given

    def _packed_bits(self, parts: Parts, shape: tuple[int, int]) -> int:
        """Bits of the layer's integers: those of the settings that fit the size of its words."""
        if "weight_packed" not in parts:
            return 8
        outputs, inputs = shape
        sizes = {bits: (outputs, -(-inputs * bits // 32)) for bits in sorted(self._bits)}
        packed = parts.get("weight_packed")
        fitting = [bits for bits, own in sizes.items() if tuple(packed.shape) == own]
        if len(fitting) != 1:
            raise ValueError(
                f"weight_packed is {[*packed.shape]} for {outputs} outputs of {inputs} inputs; it must be "
                + " or ".join(f"{[*own]} in {bits} bits" for bits, own in sizes.items())
            )
        parts.checked("weight_packed", (torch.int32,), packed.shape)
        return fitting[0]

    @staticmethod
    def _zeros(parts: Parts, scales: torch.Tensor, bits: int, outputs: slice) -> torch.Tensor | None:
        """The unsigned zeros `[out, groups]` of some outputs; `None` where weights are symmetric."""
        if "weight_zero_point" not in parts:
            return None
        zeros = parts.get("weight_zero_point")
        count = scales.shape[1]
        if zeros.dtype is torch.int32 and "weight_packed" in parts:
            packed = parts.checked("weight_zero_point", (torch.int32,), (-(-len(scales) * bits // 32), count))
            rows, of_word = words(outputs, bits)
            return unpacked(packed[rows].t(), bits)[:, of_word].t()
        if zeros.numel() == 1:
            zeros = parts.checked("weight_zero_point", (torch.int8,), zeros.shape).reshape(1, 1).expand(scales.shape)
        elif zeros.dim() == 1:
            zeros = parts.checked("weight_zero_point", (torch.int8,), (len(scales),))[:, None]
        else:
            zeros = parts.checked("weight_zero_point", (torch.int8,), scales.shape)
        return zeros[outputs].to(torch.int16) + (1 << (bits - 1))
