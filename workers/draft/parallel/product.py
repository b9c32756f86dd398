"""Products with the weights of a drafting module: float32 rows in and out, the weights in a smaller type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from workers.draft.parallel.settings import Weights
from workers.forward.native.packed_linear import PackedLinear

Product = Callable[[Tensor], Tensor]
"""Maps float32 [rows, inputs] to float32 [rows, outputs]."""
MakeProduct = Callable[[Tensor], Product]
"""Makes the product with weights [outputs, inputs]."""

_DTYPES = {"auto": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def stored_type(weights: Weights) -> torch.dtype:
    """The data type in which a CPU stores weights."""
    return _DTYPES[weights]


def make_product(weight: Tensor, weights: Weights, directory: str | None = None) -> Product:
    """The product with `weight` [outputs, inputs], on its device. On a GPU, int8 is computed in bfloat16.

    `directory` keeps the compiled CPU kernels.
    """
    if weight.device.type == "cpu":
        return PackedLinear(weight.detach(), _DTYPES[weights], directory=directory).multiply
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    own = weight.detach().to(dtype)
    return lambda rows: linear(rows.to(dtype), own).float()
