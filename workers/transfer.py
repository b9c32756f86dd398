"""Small tensors made on the host and copied to a device, without waiting for the work that the device is doing.

A copy from pageable memory would wait for the GPU. These copies go through pinned memory, which PyTorch reuses only
after the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntegerArray = npt.NDArray[np.int64]


def to_device(values: Sequence[int] | IntegerArray, device: torch.device) -> Tensor:
    """Integers on `device`, int64. An array is not copied on the way to the CPU."""
    tensor = torch.as_tensor(values, dtype=torch.int64)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def tensor_on(device: torch.device, values: Sequence[object], dtype: torch.dtype) -> Tensor:
    """A tensor of `values` on `device`."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def row_indices(rows: Sequence[int], like: Tensor) -> Tensor:
    """Row numbers as an index on the device of `like`: int64 [n]."""
    return tensor_on(like.device, rows, torch.int64)


def to_device_together(arrays: Sequence[IntegerArray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to the device in one piece. Each tensor has the shape of its array."""
    whole = to_device(np.concatenate([array.ravel() for array in arrays]), device)
    parts = torch.split(whole, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
