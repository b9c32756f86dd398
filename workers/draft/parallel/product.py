"""Products with the weights of a drafting module: float32 rows in and out, the weights in a smaller type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workers.draft.parallel.settings import Weights
from workers.forward.linear import make_linear_kernel

Product = Callable[[Tensor], Tensor]
"""Maps float32 [rows, inputs] to float32 [rows, outputs]."""


def make_product(weight: Tensor, weights: Weights) -> Product:
    """The product with `weight` [outputs, inputs], on its device."""
    if weights == "auto":
        weights = "bfloat16" if weight.is_cuda else "int8"
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    kernel = make_linear_kernel(weight.detach().to(dtype), None, "int8" if weights == "int8" else "none")
    return lambda rows: kernel.multiply(rows.to(dtype)).float()
