"""Layers of a model whose matrices stay as they are stored, until fast linear layers or the CPU kernels take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workers.forward.weights.base import Storage
from workers.forward.weights.choice import store


class StoredLinear(nn.Module):
    """Stands for an `nn.Linear` whose matrix is stored in any way."""

    weight = None
    """The matrix is no tensor. Code that asks for the dtype of the weights accepts `None`."""

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
        return self.storage.kernel(self.bias).multiply(x)


class StoredEmbedding(nn.Module):
    """Stands for an `nn.Embedding` whose table is stored in any way."""

    def __init__(self, storage: Storage, dtype: torch.dtype) -> None:
        super().__init__()
        self.storage = storage
        self.num_embeddings, self.embedding_dim = storage.outputs, storage.inputs
        self.dtype = dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `[…]` → their rows `[…, hidden]`."""
        rows = self.storage.take_outputs(tokens.flatten()).dequantized().to(self.dtype)
        return rows.view(*tokens.shape, -1)


LINEAR_TYPES: tuple[type[nn.Module], ...] = (nn.Linear, StoredLinear)
"""Types of linear layers that the CPU kernels take."""


def storage_of(layer: Any, quantization: str = "none") -> Storage:
    """The storage of a linear layer or an embedding, as it is, or as the setting `quantization` gives it."""
    if isinstance(layer, StoredLinear | StoredEmbedding):
        return layer.storage
    return store(layer.weight.detach(), quantization)
