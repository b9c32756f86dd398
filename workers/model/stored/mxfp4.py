"""MXFP4 checkpoints of gpt-oss: the experts' matrices as 4-bit floats (E2M1) in blocks of 32 with a power of two each.

`gate_up_proj_blocks` uint8 `[experts, out, in / 32, 16]`, `gate_up_proj_scales` uint8 `[experts, out, in / 32]` (the
exponent, plus 127), `gate_up_proj_bias` `[experts, out]`, and the same for `down_proj`. Other matrices are plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workers.forward.weights.base import Storage
from workers.forward.weights.floats import mxfp4_storage
from workers.model.stored.parts import Parts, Region

_BLOCK = 32


class Mxfp4:
    """The format of one checkpoint."""

    parts: frozenset[str] = frozenset()
    scales: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """There are no settings."""

    def is_quantized(self, module: str, names: frozenset[str]) -> bool:  # noqa: ARG002 - of the Protocol
        """Whether a linear layer is: none."""
        return False

    def shape(self, parts: Parts) -> tuple[int, int]:
        """No linear layer is quantized. Raises `ValueError`."""
        raise ValueError(f"{parts.module} is no layer of experts")

    def storage(self, parts: Parts, region: Region) -> Storage:  # noqa: ARG002 - of the Protocol
        """No linear layer is quantized. Raises `ValueError`."""
        raise ValueError(f"{parts.module} is no layer of experts")


def expert_storages(parts: Parts, name: str, shape: Sequence[int]) -> list[Storage]:
    """The matrices of all experts, as they are stored. `shape` is experts, outputs and inputs. Raises `ValueError`."""
    experts, outputs, inputs = shape
    if inputs % _BLOCK:
        raise ValueError(f"{name} has {inputs} inputs; their number must be a multiple of {_BLOCK}")
    size = (experts, outputs, inputs // _BLOCK)
    blocks = parts.checked(f"{name}_blocks", (torch.uint8,), (*size, _BLOCK // 2))
    exponents = parts.checked(f"{name}_scales", (torch.uint8,), size)
    return [mxfp4_storage(blocks[expert], exponents[expert]) for expert in range(experts)]
