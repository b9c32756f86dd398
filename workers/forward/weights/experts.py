"""Experts of a mixture whose matrices stay as they are stored, until the CPU kernels take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workers.forward.weights.base import LinearKernel, Storage


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """The matrices of one expert, and their biases."""

    gate_up: Storage
    gate_up_bias: torch.Tensor
    down: Storage
    down_bias: torch.Tensor


class StoredExperts(nn.Module):
    """Stands for the experts of gpt-oss. Each row is multiplied with the matrices of its own experts alone."""

    def __init__(self, experts: Sequence[Expert], gate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`gate` makes the second product's input `[rows, inner]` from the first product `[rows, 2 * inner]`."""
        super().__init__()
        self.experts = tuple(experts)
        self._gate = gate
        self._kernels: list[tuple[LinearKernel, LinearKernel]] = []
        self.use(lambda storage, bias: storage.kernel(bias))

    def use(self, kernel: Callable[[Storage, torch.Tensor], LinearKernel]) -> None:
        """Multiply with these kernels of a matrix and its bias from now on."""
        self._kernels = [
            (kernel(one.gate_up, one.gate_up_bias), kernel(one.down, one.down_bias)) for one in self.experts
        ]

    def forward(self, x: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """`x` `[rows, hidden]` → the weighted sum of its experts' outputs, `[rows, hidden]`.

        `router_indices` and `routing_weights` are `[rows, experts of a row]`.
        """
        total = torch.zeros_like(x)
        for expert in sorted(set(router_indices.flatten().tolist())):
            rows, places = torch.where(router_indices == expert)
            first, second = self._kernels[expert]
            found = second.multiply(self._gate(first.multiply(x[rows])))
            total.index_add_(0, rows, (found * routing_weights[rows, places, None]).to(x.dtype))
        return total


def gate_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gate of a layer of `transformers`, without the layer's matrices."""
    alone = nn.Module()
    alone.alpha, alone.limit = layer.alpha, layer.limit
    gate: Callable[[torch.Tensor], torch.Tensor] = type(layer)._apply_gate.__get__(alone)
    return gate
