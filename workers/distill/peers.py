"""The processes that train one draft together: each has a part of the texts, of the parameters and of their states.

Parameters are sharded by `torch.distributed.fsdp.fully_shard` (FSDP2). Whoever starts the processes has initialized
`torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


@dataclass(frozen=True, slots=True)
class Peers:
    """The processes of a training, as one of them sees them."""

    rank: int = 0
    """The number of this process."""
    count: int = 1
    mesh: DeviceMesh | None = None
    """All processes in one dimension; `None` for a process alone."""

    @classmethod
    def of(cls, group: Any, device_type: str) -> Peers:
        """The processes of an initialized group of `torch.distributed` that have devices of one type."""
        return cls(dist.get_rank(group), dist.get_world_size(group), DeviceMesh.from_group(group, device_type))

    def summed(self, value: Tensor) -> Tensor:
        """The sum of a tensor of each process; nothing waits for it on the host. No gradient passes it."""
        if self.mesh is None:
            return value
        found = value.detach().clone()
        dist.all_reduce(found, group=self.mesh.get_group())
        return found

    def shard(self, module: nn.Module, layers: Sequence[nn.Module] = ()) -> None:
        """Divide the parameters of a module among the processes, in place; gradients are summed over them.

        Each of `layers` is whole only while it computes, the other parameters from the forward pass to the end of the
        backward pass. A step calls `forward` of the module once; other methods may follow on its outputs.
        """
        if self.mesh is None:
            return
        for part in (*layers, module):
            fully_shard(part, mesh=self.mesh)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo multiplies no summands


ALONE = Peers()
"""One process."""


def own(value: Tensor) -> Tensor:
    """The part of a tensor of a sharded module that this process has."""
    found: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a sharded module, each whole on every process. All processes have to call it."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in tensors.items()}
