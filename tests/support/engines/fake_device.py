"""A device without memory and without numbers, on which an operation with tensors of two devices raises.

PyTorch's fake tensors carry shapes, types and devices alone, so what would fail on a GPU fails here on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from deploy.simulation.device.fake_device import registered_device

Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def fake_device() -> Iterator[torch.device]:
    """Inside, all tensors are fake, and the device is another one than that of `torch.tensor(…)`."""
    device = registered_device()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False):
        yield device


def moved(module: Module, device: torch.device) -> Module:
    """The module with its parameters and buffers on a fake device: `Module.to` cannot exchange fake tensors."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = nn.Parameter(value.detach().to(device), requires_grad=value.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    return module
