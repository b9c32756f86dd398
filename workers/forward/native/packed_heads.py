"""Products with a matrix for each head, packed for the CPU kernels. See experts.c, which knows heads as experts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from workers.forward.native.packed_experts import Routing, c_function
from workers.forward.native.packed_linear import PackedMatrix, kernel_layout
from workers.forward.native.structures import Matrix
from workers.forward.weights.base import KernelLayout, Storage


class PackedHeads:
    """The matrices of all heads of a layer, all of one shape. Not thread-safe."""

    def __init__(self, heads: Sequence[Storage], library: ctypes.CDLL) -> None:
        # Integers of the activations would round them in float32.
        layout = KernelLayout(kernel_layout(library).columns, lambda _: False, lambda _: False)
        self._outputs = heads[0].outputs
        self._packed = [PackedMatrix(one, None, layout) for one in heads]
        self._matrices = (Matrix * len(heads))(*(one.matrix for one in self._packed))
        self._heads = torch.arange(len(heads))
        self._ends = torch.empty(len(heads), dtype=torch.int64)
        self._multiply = c_function(library.pilotfish_experts_first, 5, 1)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, heads, in]` → `[tokens, heads, out]` of the same type. No token depends on the other tokens."""
        tokens, heads, _ = x.shape
        if not tokens:
            return x.new_empty((0, heads, self._outputs))
        rows = x.float().contiguous()
        chosen, places = self._heads.repeat(tokens), torch.empty(tokens * heads, dtype=torch.int64)
        routing = Routing(heads, tokens * heads, 1, chosen.data_ptr(), self._ends.data_ptr(), places.data_ptr())
        taken, product = torch.empty_like(rows), torch.empty((heads, tokens, self._outputs))
        addresses = (rows.data_ptr(), taken.data_ptr(), product.data_ptr())
        self._multiply(self._matrices, ctypes.byref(routing), *addresses, 0)
        return product.transpose(0, 1).to(x.dtype)
