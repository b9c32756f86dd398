"""Products with the weights of a drafting module: float32 rows in and out, the weights in a smaller type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from workers.draft.common.modules.module_settings import Weights
from workers.forward.native.packed_linear import InputNorm, PackedLinear, has_int8_tiles
from workers.forward.weights.choice import INT4

Product = Callable[[Tensor], Tensor]
"""Maps float32 [rows, inputs] to float32 [rows, outputs]."""
MakeProduct = Callable[[Tensor], Product]
"""Makes the product with weights [outputs, inputs]."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": INT4}


def stored_type(weights: Weights, directory: str | None) -> torch.dtype:
    """The data type in which a CPU stores weights. `directory` keeps the compiled CPU kernels."""
    if weights == "auto":
        return torch.int8 if has_int8_tiles(directory) else torch.bfloat16
    return _DTYPES[weights]


def entry_weights(weights: Weights) -> Weights:
    """The type in which a public draft's first matrix is stored (`fc`, or the first ones of a Hydra head).

    It is bfloat16 in place of int8 and int4. The matrix reads hidden states of several layers, or an embedding beside a
    hidden state, without a norm. One of them may be hundreds of times as large as another, and training gives its
    columns smaller weights, which are zeros in one scale with the others.
    """
    return weights if weights == "float32" else "bfloat16"


def make_product(
    weight: Tensor, weights: Weights, directory: str | None = None, norm: InputNorm | None = None
) -> Product:
    """The product with `weight` [outputs, inputs], on its device. On a GPU, int8 and int4 are computed in bfloat16.

    `norm`, if there is one, is applied to the rows first. `directory` keeps the compiled CPU kernels.
    """
    if weight.device.type == "cpu":
        return PackedLinear(weight.detach(), stored_type(weights, directory), None, directory, norm).multiply
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    own = (weight.detach() if norm is None else norm.folded(weight)).to(dtype)
    return lambda rows: linear((rows if norm is None else norm.scaled(rows)).to(dtype), own).float()
