"""The device mesh of tensor-parallel ranks, as `transformers` builds it when it loads a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import mixin
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh


@contextmanager
def ranks_on(device: torch.device) -> Iterator[None]:
    """Make `transformers` build its device mesh on the configured device.

    By default it uses the accelerator that torch was built for, even if none is present. It has no argument to choose
    another device.
    """

    def on_device(config: DistributedConfig) -> tuple[torch.device, TransformersDeviceMesh]:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        shape = (1, 1, 1, config.tp_size or 1)
        dense = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
        # Experts are not sharded (ep_size 1), so all ranks lie on the remaining axis.
        expert = init_device_mesh(
            device.type, (1, 1, shape[3], 1), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")
        )
        return device, TransformersDeviceMesh(dense, expert)

    with patch.object(mixin, "initialize_distributed_mesh", on_device):
        yield
