"""A screen of a float32 head: its leading logits without reading all of it. See leading.c."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from workers.forward.native.packed_linear import PackedMatrix, kernel_layout
from workers.forward.native.structures import Leading, Screen
from workers.forward.weights.base import pad_rows
from workers.forward.weights.int8 import Int8Storage
from workers.kv.huge_pages import Arena

MOST_LEADERS = 8  # as in leading.h
_PARTS = 16  # as in leading.h
_MOST_SCREENED = 16
"""Most rows that are screened. With more of them, products take longer than reading the head does."""
_MOST_SCREENED_AS_INTEGERS = 64
"""Most rows that are screened where int8 weights multiply as integers, which takes less time."""
_SPLIT_ERROR = 1.7e-5
"""Bound on |x - what is multiplied| ÷ the largest |x| of a row: half a fine step of 1 ÷ (127 * 254), and some
percent for rounding. See `pilotfish_split_rows` in split.c."""
_CHUNK_ROWS = 8192


class HeadScreen:
    """The int8 form of a head `[out, in]` with its bias `[out]`, and bounds of its errors."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, library: ctypes.CDLL) -> None:
        layout = kernel_layout(library)
        on_tiles = layout.multiplies_integers(weight.shape[1])
        stored = Int8Storage.quantized(weight.detach().float())
        self._packed = PackedMatrix(stored, bias, layout, Arena())
        self._error = pad_rows(_error_bounds(weight, stored, bias, is_split=on_tiles), layout.columns).clone()
        self.most_rows = _MOST_SCREENED_AS_INTEGERS if on_tiles else _MOST_SCREENED
        """Most rows for which the screen saves time."""
        self.structure = Screen(self._packed.matrix, self._error.data_ptr())
        self._blocks = len(self._packed.weight)

    def leading(self, leaders: int, rows: int) -> tuple[Leading, object]:
        """The structure that asks for the largest logits of each row, and the buffers that must live as long."""
        norms, lower = np.empty(rows, dtype=np.float32), np.empty(rows * _PARTS * MOST_LEADERS, dtype=np.float32)
        wanted = np.empty(self._blocks, dtype=np.int32)
        buffers = (norms, lower, wanted)
        return Leading(leaders, *(buffer.ctypes.data for buffer in buffers), 0), buffers

    @property
    def address(self) -> ctypes._Pointer[Screen]:
        """A pointer to the structure `Screen`, for other C structures."""
        return ctypes.pointer(self.structure)


def _error_bounds(
    weight: torch.Tensor, stored: Int8Storage, bias: torch.Tensor | None, *, is_split: bool
) -> torch.Tensor:
    """Bounds on |logit - the screen's| ÷ (1 + |input|), float32 `[out]`.

    The quantization adds at most the norm of its error times that of the input (Cauchy-Schwarz). The sums of both
    products, in single precision and in any order, add the number of inputs times the unit roundoff times the norms of
    both weights; adding the bias and scaling add a few units of the result. Inputs that are split into two rows of
    integers (`is_split`) add what the split loses of each of them times the sum of the rounded weights.
    """
    unit = 2.0**-24
    found = []
    for first in range(0, len(weight), _CHUNK_ROWS):
        part = slice(first, first + _CHUNK_ROWS)
        exact = weight[part].detach().double()
        rounded = stored.integers[part].double() * stored.scale[part].double()[:, None]
        norms = exact.norm(dim=1) + rounded.norm(dim=1)
        bound = (exact - rounded).norm(dim=1) + 2 * (weight.shape[1] + 8) * unit * norms
        if is_split:
            bound += _SPLIT_ERROR * rounded.abs().sum(dim=1)
        if bias is not None:
            bound += 8 * unit * bias[part].detach().double().abs()
        found.append(bound * 1.0001)
    return torch.cat(found).float()
