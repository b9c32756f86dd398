"""Numbers from the host to where the logits are, without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of `values` on `device`.

    A copy from ordinary memory would wait for a GPU, so it goes by pinned memory, which is not handed out again
    before the copy has been made.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def places(rows: Sequence[int], like: Tensor) -> Tensor:
    """Indices of rows: int64 [n], where `like` is."""
    return send(rows, torch.int64, like.device)
