"""The largest values of rows of logits in one call of the CPU kernels. largest.c has the kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from workers.forward.native.build import load_library

Largest = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Maps float32 [rows, size] and a count, at most the size, to the largest values of each row [rows, count], the
largest first; their columns, int64 [rows, count]; and the logarithm of the sum of all exponentials, [rows, 1].

NaN counts as minus infinity, and infinity as a large number."""

_HIGHEST = 1e30  # as in largest.c


def largest_by_torch(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `Largest` of a device without kernels of its own."""
    values = values.nan_to_num(nan=-torch.inf, posinf=_HIGHEST, neginf=-torch.inf)
    best, columns = values.topk(count)
    return best, columns, values.logsumexp(dim=1, keepdim=True)


def load_largest(device: torch.device, directory: str | None) -> Largest:
    """The kernel for values on this device; torch without one. `directory` keeps the compiled kernels."""
    library = load_library(directory) if device.type == "cpu" else None
    if library is None:
        return largest_by_torch
    compute = library.pilotfish_largest
    compute.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 3]
    compute.restype = None

    def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = values.contiguous()
        rows, size = values.shape
        best, totals = torch.empty((rows, count)), torch.empty((rows, 1))
        columns = torch.empty((rows, count), dtype=torch.int64)
        compute(values.data_ptr(), rows, size, count, *(one.data_ptr() for one in (best, columns, totals)))
        return best, columns, totals

    return largest
