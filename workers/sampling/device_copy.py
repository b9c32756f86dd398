"""Small tensors made on the host and copied to a device, without waiting for the work that the device is doing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tensor_on(device: torch.device, values: Sequence[object], dtype: torch.dtype) -> Tensor:
    """A tensor of `values` on `device`.

    A copy from pageable memory would wait for the GPU. The copy goes through pinned memory, which PyTorch reuses only
    after the copy is done.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def row_indices(rows: Sequence[int], like: Tensor) -> Tensor:
    """Row numbers as an index on the device of `like`: int64 [n]."""
    return tensor_on(like.device, rows, torch.int64)
