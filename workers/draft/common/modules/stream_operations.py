"""What a drafting module's layers do to the residual stream between products: on GPUs, one launch each.

The kernels are those of a target's fused layers (`workers.forward.layer_kernels`), over float32 rows.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from workers.forward.layer_kernels import TritonKernels
from workers.model.drafting.ends import rms_norm

logger = logging.getLogger(__name__)

_TRIAL_ROWS = 5
_TRIAL_TOLERANCE = 1e-4


class StreamOperations(Protocol):
    """Rows are float32 [rows, dim], and contiguous."""

    def normalize(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """The RMS norm of each row; `weight` is float32 [dim]."""

    def add_and_normalize(self, rows: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """`rows + added`, and the RMS norm of that."""

    def silu_mul(self, gates: Tensor, values: Tensor) -> Tensor:
        """`silu(gates) * values`, of rows that may lie apart."""


class TorchOperations:
    """The operations by torch."""

    def normalize(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return rms_norm(rows, weight, epsilon)

    def add_and_normalize(self, rows: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        sums = rows + added
        return sums, rms_norm(sums, weight, epsilon)

    def silu_mul(self, gates: Tensor, values: Tensor) -> Tensor:
        return silu(gates) * values


@lru_cache
def operations_on(device: torch.device, dim: int, inner: int) -> StreamOperations:
    """The operations of layers with this hidden and this inner width.

    On a GPU they are kernels, which are compiled and tried here, so that nothing is compiled while serving. Logs why
    they are not used.
    """
    plain = TorchOperations()
    if device.type != "cuda":
        return plain
    try:
        kernels = TritonKernels()
        difference = trial_difference(kernels, device, dim, inner)
    except Exception as error:  # a compiler may raise anything
        logger.warning("drafting modules normalise without kernels: %r", error)
        return plain
    if not difference < _TRIAL_TOLERANCE:
        logger.warning("drafting modules normalise without kernels, which differ by %.1e", difference)
        return plain
    return kernels


@torch.inference_mode()
def trial_difference(kernels: StreamOperations, device: torch.device, dim: int, inner: int) -> float:
    """The largest difference of the kernels' results from those by torch."""
    generator, plain = torch.Generator().manual_seed(0), TorchOperations()

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    rows, added, both = drawn(_TRIAL_ROWS, dim), drawn(_TRIAL_ROWS, dim), drawn(_TRIAL_ROWS, 2 * inner)
    weight, (gates, values) = 1 + 0.1 * drawn(dim), both.chunk(2, dim=-1)
    found, expected = (
        [
            one.normalize(rows, weight, 1e-6),
            *one.add_and_normalize(rows, added, weight, 1e-6),
            one.silu_mul(gates, values),
        ]
        for one in (kernels, plain)
    )
    return max(float((mine - other).abs().max()) for mine, other in zip(found, expected, strict=True))
