"""The operations of fused decoder layers in plain PyTorch, which the kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from workers.forward.expert_choice import ExpertChoice
from workers.forward.layer_kernels import StreamProduct
from workers.forward.projections import rms_norm
from workers.ranks import begin_sum_over_ranks


class ReferenceKernels:
    """`LayerKernels` in plain PyTorch."""

    def normalize(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMSNorm of each row."""
        return rms_norm(rows, weight, epsilon)

    def add_and_normalize(
        self,
        rows: torch.Tensor,
        added: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows + added`, and the RMSNorm of that, in `out` if it is given."""
        total = rows + added
        normalized = rms_norm(total, weight, epsilon)
        return (total, normalized) if out is None else (out[0].copy_(total), out[1].copy_(normalized))

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`silu(gates) * values`."""
        return functional.silu(gates) * values

    def choose(self, logits: torch.Tensor, choice: ExpertChoice) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of each row's experts."""
        return choice.of(logits)

    def product(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        follows_gate: bool,
    ) -> StreamProduct | None:
        """None: the layers multiply."""
        return None

    def begin_sum(self, part: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a tensor by the sum of all ranks' tensors."""
        return begin_sum_over_ranks(part)
