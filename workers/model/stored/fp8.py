"""FP8 checkpoints: 8-bit floats (E4M3) with a scale per tensor, per output, per group of inputs, or per block.

`weight` float8_e4m3fn `[out, in]` and its scales: `weight_scale_inv` `[out / rows, in / columns]` for blocks of
`weight_block_size` (128 × 128 in DeepSeek's checkpoints), or `weight_scale` `[out, groups]`, `[out]` or one for all, as
compressed-tensors and FBGEMM write them. A weight is value * scale, by either name. Quantization of activations, which
these checkpoints ask for, is not applied: the logits are those of the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from workers.forward.weights.base import Storage
from workers.forward.weights.floats import e4m3_storage
from workers.model.stored.parts import FLOATS, Parts, Region, own_groups, scales_of, two_sizes

_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8:
    """The format of one checkpoint."""

    parts = frozenset({"weight", *_SCALES, "input_scale", "activation_scale", "input_scale_ub", "input_zero_point"})
    scales = _SCALES

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises `ValueError` for settings that are not read."""
        fmt = settings.get("fmt", "e4m3")
        if fmt != "e4m3":
            raise ValueError(f"fmt is {fmt!r}; it must be e4m3")
        block = settings.get("weight_block_size")
        if block is not None and not _is_block(block):
            raise ValueError(f"weight_block_size is {block!r}; it must have two sizes of at least 1")
        self._block = None if block is None else (int(block[0]), int(block[1]))

    def is_quantized(self, names: Collection[str]) -> bool:
        """Whether a layer has a scale."""
        return "weight" in names and any(scale in names for scale in _SCALES)

    def shape(self, parts: Parts) -> tuple[int, int]:
        """Outputs and inputs of the matrix."""
        return two_sizes("weight", [*parts.get("weight").shape])

    def storage(self, parts: Parts, region: Region) -> Storage:
        """A region of a matrix."""
        shape = self.shape(parts)
        outputs, inputs = shape
        weight = parts.checked("weight", (torch.float8_e4m3fn,), shape)[region.outputs, region.inputs]
        name = next(scale for scale in _SCALES if scale in parts)
        scales, rows = self._scales(parts, name, shape)
        columns = inputs // scales.shape[1] if self._block is None else self._block[1]
        own = slice(0, scales.shape[1])
        if scales.shape[1] > 1 and (region.inputs.start, region.inputs.stop) != (0, inputs):
            own = own_groups(region.inputs, inputs, columns)
        group_of = (torch.arange(inputs) // columns)[region.inputs] - own.start
        of_outputs = (torch.arange(outputs) // rows)[region.outputs]
        return e4m3_storage(weight, scales[:, own][of_outputs], group_of)

    def _scales(self, parts: Parts, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, int]:
        """The scales `[out / rows, groups]`, and how many outputs share a row of them."""
        outputs, inputs = shape
        if self._block is not None:
            rows, columns = self._block
            return parts.checked(name, FLOATS, (-(-outputs // rows), -(-inputs // columns))), rows
        scales = scales_of(parts, name, shape)
        if inputs % scales.shape[1]:
            raise ValueError(
                f"{name} has {scales.shape[1]} groups of {inputs} inputs; their number must divide the inputs"
            )
        return scales, 1


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block)
    )
