"""MXFP4 checkpoints of gpt-oss: the experts' matrices as 4-bit floats (E2M1) in blocks of 32 with a power of two each.

`gate_up_proj_blocks` uint8 `[experts, out, in / 32, 16]`, `gate_up_proj_scales` uint8 `[experts, out, in / 32]` (the
exponent, plus 127), `gate_up_proj_bias` `[experts, out]`, and the same for `down_proj`. Other matrices are plain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workers.forward.weights.base import Storage
from workers.forward.weights.floats import mxfp4_storage
from workers.model.stored.parts import Parts, Region, own_groups

BLOCK = 32
"""Inputs of a block."""


class Mxfp4:
    """The format of one checkpoint."""

    parts: frozenset[str] = frozenset()
    scales: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """There are no settings."""

    def is_quantized(self, names: Collection[str]) -> bool:  # noqa: ARG002 - of the Protocol
        """Whether a linear layer is: none."""
        return False

    def shape(self, parts: Parts) -> tuple[int, int]:
        """No linear layer is quantized. Raises `ValueError`."""
        raise ValueError(f"{parts.module} is no layer of experts")

    def storage(self, parts: Parts, region: Region) -> Storage:  # noqa: ARG002 - of the Protocol
        """No linear layer is quantized. Raises `ValueError`."""
        raise ValueError(f"{parts.module} is no layer of experts")


@dataclass(frozen=True, slots=True)
class ExpertRegion:
    """What a rank keeps of the matrices of all experts. Slices have a start and a stop, and no step."""

    experts: slice
    matrix: Region


def expert_storages(parts: Parts, name: str, shape: Sequence[int], region: ExpertRegion) -> list[Storage]:
    """A region of the experts' matrices, as they are stored. `shape` is that of all: experts, outputs and inputs.

    Only the region is read. Raises `ValueError`, and `CutRefused` if the region cuts a block of 32 inputs.
    """
    experts, outputs, inputs = shape
    if inputs % BLOCK:
        raise ValueError(f"{name} has {inputs} inputs; their number must be a multiple of {BLOCK}")
    size = (experts, outputs, inputs // BLOCK)
    blocks = parts.checked(f"{name}_blocks", (torch.uint8,), (*size, BLOCK // 2))
    exponents = parts.checked(f"{name}_scales", (torch.uint8,), size)
    own = region.matrix
    kept = own.outputs, own_groups(own.inputs, inputs, BLOCK)
    chosen = range(region.experts.start, region.experts.stop)
    return [mxfp4_storage(blocks[expert][kept], exponents[expert][kept]) for expert in chosen]
