"""The products of a mixture's experts with packed weights. See experts.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch

from workers.forward.native.packed_linear import PackedMatrix, c_function, float_layout, gate_up_order
from workers.forward.native.structures import Matrix
from workers.forward.weights.base import taken_rows
from workers.forward.weights.experts import Expert, Gate, gated_rows, swiglu


class Routing(ctypes.Structure):
    """The C structure that says which expert computes which tokens. See experts.c for its fields."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("experts", "tokens", "each")),
        *((name, ctypes.c_void_p) for name in ("chosen", "ends", "rows")),
    ]


class PackedExperts:
    """The matrices of all experts of a layer, packed for the CPU kernels. Not thread-safe."""

    def __init__(self, experts: Sequence[Expert], gate: Gate, library: ctypes.CDLL) -> None:
        """The kernels apply `swiglu` themselves, and torch any other gate."""
        layout = float_layout(library)
        self._outputs, self._inner = experts[0].first.outputs, experts[0].second.inputs
        self._gate = None if gate is swiglu else gate
        if self._gate is None:
            experts = [_interleaved(one, layout.columns) for one in experts]
        first = [PackedMatrix(one.first, one.first_bias, layout) for one in experts]
        second = [PackedMatrix(one.second, one.second_bias, layout) for one in experts]
        self._packed = first, second
        self._first, self._second = (
            (Matrix * len(experts))(*(one.matrix for one in matrices)) for matrices in self._packed
        )
        self._ends = torch.empty(len(experts), dtype=torch.int64)
        self._multiply_first = c_function(library.pilotfish_experts_first, 5, 1)
        self._multiply_second = c_function(library.pilotfish_experts_second, 7, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        return sum(one.weight.nbytes for matrices in self._packed for one in matrices)

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` → the weighted sums of its experts' outputs, float32 `[tokens, hidden]`.

        `chosen` and `weights` are `[tokens, experts of a token]`. A number that is no expert's chooses none. No token's
        sum depends on the other tokens.
        """
        tokens, each = chosen.shape
        x, chosen, weights = x.float().contiguous(), chosen.long().contiguous(), weights.float().contiguous()
        hidden, most = x.shape[1], tokens * each
        sums = torch.empty((tokens, hidden))
        if not tokens:
            return sums
        rows = torch.empty((tokens, each), dtype=torch.int64)
        addresses = chosen.data_ptr(), self._ends.data_ptr(), rows.data_ptr()
        routing = ctypes.byref(Routing(len(self._ends), tokens, each, *addresses))
        found = torch.empty((most, hidden))  # first the rows' inputs, later their products
        inner = self._inner if self._gate is None else 0
        product = torch.empty((most, inner or self._outputs))
        self._multiply_first(self._first, routing, x.data_ptr(), found.data_ptr(), product.data_ptr(), inner)
        source = None
        if self._gate is not None:
            gated = gated_rows(self._gate, product[: int(self._ends[-1])], self._inner).contiguous()
            source, product = gated.data_ptr(), torch.empty_like(gated)
        self._multiply_second(
            *(self._second, routing, source, product.data_ptr(), weights.data_ptr()),
            *(found.data_ptr(), sums.data_ptr()),
        )
        return sums


def _interleaved(expert: Expert, columns: int) -> Expert:
    """The expert with the outputs of its first matrix in the order of the kernels' gate."""
    order = gate_up_order(expert.second.inputs, columns)
    bias = None if expert.first_bias is None else taken_rows(expert.first_bias, order)
    return replace(expert, first=expert.first.take_outputs(order), first_bias=bias)
