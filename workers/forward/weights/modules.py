"""Layers of a model whose matrices stay as they are stored, until fast linear layers or the CPU kernels take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workers.forward.weights.base import Storage
from workers.forward.weights.choice import store
from workers.kv.start_memory import release_free_memory

_LARGE = 4 << 20
"""Least bytes of a matrix after whose product freed memory is released."""
Rows = Callable[[torch.Tensor], torch.Tensor]
"""From numbers of outputs, int64 `[rows]`, to these rows of a matrix, float32 `[rows, in]`."""


class StoredLinear(nn.Module):
    """Stands for an `nn.Linear` whose matrix is stored in any way."""

    weight = None
    """The matrix is no tensor. Code that asks for the dtype of the weights accepts `None`."""

    storage: Storage
    """The matrix. `take_storage` removes it."""

    def __init__(self, storage: Storage, bias: torch.Tensor | None = None, *, sums_ranks: bool = False) -> None:
        """`bias` is `[out]`. `sums_ranks`: these are one rank's inputs, and the sum of all ranks is the product."""
        super().__init__()
        self.storage = storage
        self.bias: torch.Tensor | None
        self.in_features, self.out_features = storage.inputs, storage.outputs
        self.sums_ranks = sums_ranks
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, in]` → `[…, out]`, by torch's operators and without other ranks."""
        product = self.storage.kernel(self.bias).multiply(x)
        if self.storage.nbytes >= _LARGE:
            release_free_memory()  # of widened parts: a loaded model is tried while all its weights are in memory
        return product


class StoredEmbedding(nn.Module):
    """Stands for an `nn.Embedding` whose table is stored in any way."""

    def __init__(self, storage: Storage, dtype: torch.dtype, factor: torch.Tensor | float | None = None) -> None:
        """Rows are rounded to `dtype`, and multiplied by `factor`, if there is one, which has no dimensions."""
        super().__init__()
        self.storage = storage
        self.num_embeddings, self.embedding_dim = storage.outputs, storage.inputs
        self.dtype = dtype
        self._rows: Rows | None = None
        self.factor: torch.Tensor | float | None
        if isinstance(factor, torch.Tensor):
            self.register_buffer("factor", factor, persistent=False)
        else:
            self.factor = factor

    @property
    def is_shared(self) -> bool:
        """Whether there is no table, because rows are read from elsewhere."""
        return self._rows is not None

    def share(self, rows: Rows) -> None:
        """Read rows by `rows` from now on, as from a packed head that is the same matrix, and free the table."""
        self._rows = rows
        del self.storage

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `[…]` → their rows `[…, hidden]`."""
        ids = tokens.flatten()
        rows = self.storage.take_outputs(ids).dequantized() if self._rows is None else self._rows(ids)
        rows = rows.to(self.dtype).view(*tokens.shape, -1)
        return rows if self.factor is None else rows * self.factor


LINEAR_TYPES: tuple[type[nn.Module], ...] = (nn.Linear, StoredLinear)
"""Types of linear layers that the CPU kernels take."""


def take_storage(layer: Any, quantization: str = "none") -> Storage:
    """The storage of a linear layer, as it is, or as the setting `quantization` gives it.

    The layer no longer has a matrix, so that it is freed as soon as it is packed. The layer keeps its bias.
    """
    if isinstance(layer, StoredLinear):
        storage = layer.storage
        del layer.storage
        return storage
    weight = layer.weight.detach()
    layer._parameters["weight"] = None
    return store(weight, quantization)
