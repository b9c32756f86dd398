"""The kernels of layers, which are counted instead of launched."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deploy.simulation.device.fake_device import Kernel, KernelCounter
from workers.forward.expert_choice import ExpertChoice
from workers.forward.experts import ExpertMatrices
from workers.forward.projections import Gated
from workers.forward.residual_product import GATED_ROWS
from workers.forward.triton.tiles import MOST_NORMALIZED

ALL_REDUCE, WAIT = "all_reduce", "wait"
"""Beginnings and ends of sums over ranks, among the kernels of a step in their order."""


class CountedKernels:
    """The kernels of fused layers, which are counted instead of launched."""

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter

    def normalize(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,  # noqa: ARG002 - part of the interface
    ) -> torch.Tensor:
        self._counter.add(Kernel("normalize_rows", (2 * rows.numel() + weight.numel()) * rows.element_size()))
        return torch.empty_like(rows)

    def add_and_normalize(
        self,
        rows: torch.Tensor,
        added: torch.Tensor,  # noqa: ARG002 - part of the interface
        weight: torch.Tensor,
        epsilon: float,  # noqa: ARG002
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._counter.add(Kernel("normalize_rows", (4 * rows.numel() + weight.numel()) * rows.element_size()))
        return (torch.empty_like(rows), torch.empty_like(rows)) if out is None else out

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self._counter.add(Kernel("gate_columns", 3 * gates.numel() * gates.element_size()))
        return gates.new_empty(gates.shape)

    def choose(self, logits: torch.Tensor, choice: ExpertChoice) -> tuple[torch.Tensor, torch.Tensor]:
        weights = logits.new_empty((len(logits), choice.each))
        chosen = torch.empty(weights.shape, dtype=torch.int64, device=logits.device)
        self._counter.add(Kernel("choose_experts", logits.numel() * logits.element_size() + 10 * weights.numel()))
        return weights, chosen

    def product(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,  # noqa: ARG002 - part of the interface
        *,
        follows_gate: bool,
    ) -> _CountedProduct:
        return _CountedProduct(weight, self._counter, most_gated=max(GATED_ROWS) if follows_gate else 0)

    def begin_sum(self, part: torch.Tensor) -> Callable[[], None]:
        self._counter.add(Kernel(ALL_REDUCE, part.numel() * part.element_size()))
        return lambda: self._counter.add(Kernel(WAIT, 0))


class _CountedProduct:
    """A product that adds to the residual stream, which is counted instead of launched."""

    def __init__(self, weight: torch.Tensor, counter: KernelCounter, most_gated: int) -> None:
        self._weight, self._counter, self.most_gated = weight, counter, most_gated

    def multiply(self, x: torch.Tensor | Gated) -> torch.Tensor:
        return self._weight.new_empty((self._count(x, 0), len(self._weight)))

    def add_and_normalize(
        self,
        x: torch.Tensor | Gated,
        stream: torch.Tensor,
        norm: tuple[torch.Tensor, float],  # noqa: ARG002 - part of the interface
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_one = len(stream) <= MOST_NORMALIZED
        self._count(x, 2 if is_one else 1)
        if not is_one:
            self._counter.add(Kernel("normalize_rows", 2 * stream.numel() * stream.element_size()))
        return torch.empty_like(stream), torch.empty_like(stream)

    def _count(self, x: torch.Tensor | Gated, others: int) -> int:
        """Count the product, and that many more readings or writings of its results. Returns the number of rows."""
        outputs, inputs = self._weight.shape
        rows, read = (x.tokens, 2 * inputs) if isinstance(x, Gated) else (len(x), inputs)
        numbers = self._weight.numel() + rows * (read + (1 + others) * outputs)
        self._counter.add(Kernel("multiply_splits", numbers * self._weight.element_size(), 2 * rows * outputs * inputs))
        return rows


class CountedExperts:
    """The kernels of the experts of a layer, which are counted instead of launched."""

    def __init__(self, matrices: ExpertMatrices, number_bytes: float, counter: KernelCounter) -> None:
        self._matrices, self._number_bytes, self._counter = matrices, number_bytes, counter
        self.read = 0
        """Bytes of the matrices that a step reads."""

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        rows = self._multiply(x, chosen)
        self._counter.add(Kernel("add_rows", (rows * x.shape[1] + x.numel()) * x.element_size()))
        return torch.empty_like(x)

    def _multiply(self, x: torch.Tensor, chosen: torch.Tensor) -> int:
        """Count the routing and the products. Returns the number of rows of all experts."""
        matrices, rows, element = self._matrices, chosen.numel(), x.element_size()
        experts = len(matrices.first)
        share = 1 - (1 - chosen.shape[1] / experts) ** len(chosen)  # of the experts: each token chooses by itself
        self._counter.add(Kernel("route_expert", 16 * rows))
        for matrix, inputs in ((matrices.first, x.numel()), (matrices.second, rows * matrices.second.shape[2])):
            read = int(share * matrix.numel() * self._number_bytes)
            outputs = matrices.second.shape[2] if matrix is matrices.first else matrix.shape[1]
            flops = 2 * rows * matrix.shape[1] * matrix.shape[2]
            self._counter.add(Kernel("multiply_tiles", read + (inputs + rows * outputs) * element, flops))
            self.read += read
        return rows


class CountedStreamExperts(CountedExperts):
    """Experts that add to the residual stream, as they do where no ranks sum theirs before."""

    def mix_add_and_normalize(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,  # noqa: ARG002 - part of the interface
        stream: torch.Tensor,
        norm: tuple[torch.Tensor, float],  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._multiply(x, chosen)
        numbers = rows * x.shape[1] + 3 * x.numel()
        self._counter.add(Kernel("add_rows_and_normalize", numbers * x.element_size()))
        return torch.empty_like(stream), torch.empty_like(stream)
