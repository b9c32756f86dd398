"""The operations of fused decoder layers between attention and products, as kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from workers.forward.expert_choice import ExpertChoice
from workers.forward.projections import Gated
from workers.forward.residual_product import NoResidualProduct, residual_product
from workers.ranks import begin_sum_over_ranks

logger = logging.getLogger(__name__)


class StreamProduct(Protocol):
    """A product whose results are added to the residual stream (`workers.forward.residual_product`)."""

    @property
    def most_gated(self) -> int:
        """Most rows of gates and values that it multiplies, with the bits of `LayerKernels.silu_mul`."""

    def multiply(self, x: torch.Tensor | Gated) -> torch.Tensor:
        """`x` `[rows, in]` → `[rows, out]`."""

    def add_and_normalize(
        self, x: torch.Tensor | Gated, stream: torch.Tensor, norm: tuple[torch.Tensor, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`stream` plus the product, and the RMSNorm of that. `norm` is the norm's weight and epsilon."""


class LayerKernels(Protocol):
    """The operations of a layer between its products and its attention. Rows are contiguous, `[rows, dim]`."""

    def normalize(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMSNorm of each row."""

    def add_and_normalize(
        self,
        rows: torch.Tensor,
        added: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows + added`, and the RMSNorm of that, in `out` if it is given."""

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`silu(gates) * values`, of rows that may lie apart."""

    def choose(self, logits: torch.Tensor, choice: ExpertChoice) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of each row's experts, `[rows, experts of a token]` each, as `choice.of` returns them."""

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, follows_gate: bool) -> StreamProduct | None:
        """The product with a plain matrix `[out, in]`; `None` if it is left to the layer.

        `follows_gate` says that it multiplies what `silu_mul` returns.
        """

    def begin_sum(self, part: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a tensor by the sum of all ranks' tensors. The result waits until it is there."""


class TritonKernels:
    """The operations as Triton kernels, one launch each. Making them raises `ImportError` without `triton`."""

    def __init__(self) -> None:
        from workers.forward.triton import experts, gate, norm

        self._experts, self._gate, self._norm = experts, gate, norm

    def normalize(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return self._norm.normalize(rows, weight, epsilon)

    def add_and_normalize(
        self,
        rows: torch.Tensor,
        added: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm.add_and_normalize(rows, added, weight, epsilon, out)

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`silu(gates) * values`."""
        return self._gate.silu_mul(gates, values)

    def choose(self, logits: torch.Tensor, choice: ExpertChoice) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of each row's experts."""
        return self._experts.choose(logits, choice)

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, follows_gate: bool) -> StreamProduct | None:
        """The product in fixed splits, if it passes its trial on the device."""
        try:
            return residual_product(weight, bias, follows_gate=follows_gate)
        except NoResidualProduct as error:
            logger.warning("products %s are left to the library: %s", tuple(weight.shape), error)
            return None

    def begin_sum(self, part: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a tensor by the sum of all ranks' tensors."""
        return begin_sum_over_ranks(part)
