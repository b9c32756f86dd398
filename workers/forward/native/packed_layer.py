"""A decoder layer of a drafting module after its attention, in one call of the CPU kernels. See decoder.c."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm, silu

from workers.forward.native.build import load_library
from workers.forward.native.packed_linear import PackedLinear, PackedMatrix, block_columns, interleave, stored_as
from workers.forward.native.structures import DecoderLayer, Matrix


@dataclass(frozen=True, slots=True, eq=False)
class OutputWeights:
    """The weights of a Llama-like layer after its attention, all on CPU."""

    out: torch.Tensor  # [hidden, heads * dim]
    norm: torch.Tensor  # [hidden], of the RMS norm before the feed-forward network
    gate: torch.Tensor  # [inner, hidden]
    up: torch.Tensor  # [inner, hidden]
    down: torch.Tensor  # [hidden, inner]
    epsilon: float


class PackedLayerOutput:
    """`h = residual + out(attended)`, then `h + down(SiLU(gate(n)) * up(n))` with `n = norm(h)`. Not thread-safe.

    `dtype` and `directory`: see `PackedLinear`, which multiplies where the kernels cannot.
    """

    def __init__(
        self, weights: OutputWeights, dtype: torch.dtype = torch.bfloat16, directory: str | None = None
    ) -> None:
        self._weights = weights
        self.hidden, self.inputs = weights.out.shape
        self._inner = len(weights.gate)
        is_odd = any(width % 2 for width in (self.hidden, self.inputs, self._inner))
        library = None if dtype is torch.bfloat16 and is_odd else load_library(directory)
        self._products: tuple[PackedLinear, ...] = ()
        if library is None:
            matrices = (weights.out, torch.cat([weights.gate, weights.up]), weights.down)
            self._products = tuple(PackedLinear(matrix, dtype, directory=directory) for matrix in matrices)
        else:
            self._pack(weights, dtype, library)

    def _pack(self, weights: OutputWeights, dtype: torch.dtype, library: ctypes.CDLL) -> None:
        columns = block_columns(library)
        gate_up = interleave(weights.gate, weights.up, columns)
        self._packed = [
            PackedMatrix(*stored_as(matrix, dtype), None, columns) for matrix in (weights.out, gate_up, weights.down)
        ]
        self._norm = weights.norm.detach().float().clone()
        out, gated, down = (packed.matrix for packed in self._packed)
        self._layer = DecoderLayer(Matrix(), out, gated, down, None, self._norm.data_ptr())
        self._address = ctypes.addressof(self._layer)
        self._scratch = torch.empty(0)
        self._compute = library.pilotfish_layer_output
        self._compute.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_float]
        self._compute.restype = None

    def apply(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output, float32 `[rows, hidden]`.

        `residual` `[rows, hidden]` is the residual stream before the layer and `attended` `[rows, heads * dim]` what
        its attention found, both float32. Raises `ValueError` for another shape or dtype.
        """
        rows = len(residual)
        for name, given, width in (("residual", residual, self.hidden), ("attended", attended, self.inputs)):
            if given.shape != (rows, width) or given.dtype is not torch.float32:
                raise ValueError(
                    f"{name}: {given.dtype} {tuple(given.shape)} is refused; it must be float32 {(rows, width)}"
                )
        if self._products:
            return self._apply_with_torch(residual, attended)
        x, attended = residual.clone(memory_format=torch.contiguous_format), attended.contiguous()
        widest = max(self.hidden, self.inputs)
        if len(self._scratch) < rows * (widest + self._inner):
            self._scratch = torch.empty(rows * (widest + self._inner))
        work = self._scratch.data_ptr()
        self._compute(
            *(self._address, attended.data_ptr(), x.data_ptr(), work, work + 4 * rows * widest),
            *(rows, self._weights.epsilon),
        )
        return x

    def _apply_with_torch(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        out, gate_up, down = self._products
        residual = residual + out.multiply(attended)
        inner = rms_norm(residual, (self.hidden,), self._weights.norm.float(), self._weights.epsilon)
        gate, up = gate_up.multiply(inner).chunk(2, dim=-1)
        return residual + down.multiply(silu(gate) * up)
