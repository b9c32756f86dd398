"""Copies of integers from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

IntegerArray = npt.NDArray[np.int64]


def to_device(values: Sequence[int] | IntegerArray, device: torch.device) -> torch.Tensor:
    """Copy integers to the device as int64. The host does not wait for the copy."""
    tensor = torch.as_tensor(values, dtype=torch.int64)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
