"""A device without memory or arithmetic: tensors on it have shapes alone, and every mistake on it is an error.

Tensors are PyTorch's fake tensors on a device of their own, so no weights are needed. An operation on tensors of two
devices raises, and so does everything that would make the host wait for the device, such as `.item()`. A mode counts
the kernels that a GPU would launch, the bytes that they read and write, and their operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

from workers import transfer
from workers.forward import experts, latent_heads, linear

DEVICE = "pilotfish_fake"
"""The type of the device."""

_GATHERS = {"embedding", "index_select", "index", "gather", "index_copy_", "index_put_"}
"""Operations that touch some rows of their largest tensor alone."""
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh", "_unsafe_view"}
"""Operations that launch nothing."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch."""

    name: str
    bytes: int
    """Read and written, each tensor once."""
    flops: int = 0
    steps: int = 0
    """What one of its programs computes, each after the one before: tokens of a recurrence, or keys of a split."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation of PyTorch that launches a kernel, or a kernel of our own."""

    kernel: Kernel
    region: int = 0
    """The compiler fuses neighbours of one region; 0 is outside of what is compiled."""
    reads: tuple[torch.Tensor, ...] = ()
    writes: tuple[torch.Tensor, ...] = ()
    """Tensors that the operation writes, held so that no other tensor takes their identity."""


@lru_cache(maxsize=1)
def registered_device() -> torch.device:
    """The device, which PyTorch knows from the first call on. A process has one such device."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(DEVICE)
    # Whatever of this process recomputes activations, also on a CPU, asks the backend.
    getattr(torch, DEVICE).get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return torch.device(DEVICE)


@contextmanager
def fake_device() -> Iterator[torch.device]:
    """Inside, all tensors are fake; those on the yielded device are on a GPU that nobody has.

    Lists and arrays of their numbers count from 0, those of a row of floats fall. To make a list, the host copies the
    whole tensor and waits, as on a GPU. Tensors that are copied together are waited for once.
    """
    device = registered_device()
    with (
        FakeTensorMode(),
        patch.object(FakeTensor, "tolist", _listed),
        patch.object(FakeTensor, "numpy", _counted),
        patch.object(transfer, "wait_for_device", _waited),
    ):
        yield device


def _counted(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The numbers of a host tensor in its type. Raises `TypeError` for types that NumPy lacks."""
    kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
    return _numbers(tensor).astype(kind)


def _numbers(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Numbers of a tensor's shape that count from 0. Those of a row of floats fall from 0.9 on to a tenth each."""
    numbers = np.arange(tensor.numel()).reshape(tuple(tensor.shape))
    return 0.9 * 0.1 ** (numbers % (tensor.shape or (1,))[-1]) if tensor.is_floating_point() else numbers


def _waited(device: torch.device) -> None:
    """Note a wait for copies to the host that were launched before."""
    if device.type == DEVICE:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, KernelCounter):
                mode.waits += 1


def _listed(tensor: torch.Tensor) -> Any:
    """The numbers of a tensor, which is copied to the host."""
    tensor.cpu()
    return _numbers(tensor).tolist()


class KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations on the fake device, and knows which of them the compiler fuses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.copies = 0
        """Tensors copied from the host to the device."""
        self.waits = 0
        """Times that the host waits for the device, to read what is copied from it."""
        self.read_bytes = 0
        """Bytes copied from the device to the host."""
        self.region = 0
        """Number of the region that is computed; 0 outside of all."""

    def add(self, *kernels: Kernel) -> None:
        """Record kernels that are not operations of PyTorch."""
        self.operations += map(Operation, kernels)

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (inside := _OPAQUE.get(str(function._overloadpacket))) is not None:
            region, self.region = self.region, 0  # the compiler does not look inside
            with self:
                output = inside(*args, **kwargs)
            self.region = region
            return output
        if function.namespace == "prim":  # what a tensor is asked about itself
            return function(*args, **kwargs)
        if function._overloadpacket not in flop_registry:
            with self:  # what consists of other operations is counted as these
                decomposed = function.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        inputs = _tensors((args, kwargs))
        goes_to_device = getattr(kwargs.get("device"), "type", None) == DEVICE
        with _without_values(inputs if goes_to_device else ()):
            output = function(*args, **kwargs)
        outputs = _tensors(output)
        on_device = [tensor.device.type == DEVICE for tensor in (*inputs, *outputs)]
        if not any(on_device):
            return output
        if not all(on_device) and "copy" in function.__name__:
            if outputs[0].device.type == DEVICE:
                self.copies += 1
            else:
                self.waits += not kwargs.get("non_blocking")
                self.read_bytes += sum(_bytes(one) for one in outputs)
        elif not _is_free(function, inputs, outputs):
            kernel = _kernel(function, args, kwargs, output)
            region = 0 if kernel.flops else self.region
            self.operations.append(Operation(kernel, region, (*inputs,), (*outputs,)))
        return output

    def eager(self) -> list[Kernel]:
        """The kernels without a compiler: one per operation."""
        return [operation.kernel for operation in self.operations]

    def fused(self) -> list[Kernel]:
        """The kernels with one: neighbours of a region are one kernel, which reads and writes what others need."""
        last_read = {_place(one): index for index, each in enumerate(self.operations) for one in each.reads}
        kernels: list[Kernel] = []
        for region, group in groupby(enumerate(self.operations), lambda entry: entry[1].region):
            members = list(group)
            if not region:
                kernels += [operation.kernel for _, operation in members]
                continue
            end = members[-1][0]
            made = {_place(one) for _, operation in members for one in operation.writes}
            reads = {_place(one): _bytes(one) for _, each in members for one in each.reads if _place(one) not in made}
            writes = {
                _place(one): _bytes(one)
                for _, each in members
                for one in each.writes
                if last_read.get(_place(one), -1) > end or _place(one) not in last_read
            }
            kernels.append(Kernel("fused", sum(reads.values()) + sum(writes.values())))
        return kernels


@register_flop_formula(torch.ops.pilotfish.group_product, get_raw=True)
def _packed_flops(x: torch.Tensor, parts: Any, numbers: Sequence[int], zero: float, **_: Any) -> int:  # noqa: ARG001
    """Operations of a product with packed weights."""
    return 2 * x.numel() * numbers[0]


_OPAQUE: dict[str, Callable[..., Any]] = {
    "pilotfish.linear": linear._linear,
    "pilotfish.joined": linear._joined,
    "pilotfish.experts": experts._mix,
    "pilotfish.heads": latent_heads.multiply_heads,
}
"""Operators of our own, by what they do."""


def _place(tensor: torch.Tensor) -> int:
    """What identifies a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _without_values(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, single numbers on the host are fake as well: PyTorch would copy their values to the device."""
    values = [(tensor, tensor.constant) for tensor in tensors if isinstance(tensor, FakeTensor)]
    try:
        for tensor, _ in values:
            tensor.constant = None
        yield
    finally:
        for tensor, value in values:
            tensor.constant = value


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_free(function: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Whether an operation only looks at a tensor in another way, reserves memory, or has nothing to compute."""
    if function._overloadpacket.__name__ in _FREE or not any(one.numel() for one in outputs):
        return True
    if function._schema.is_mutable:
        return False
    storages = {_place(tensor) for tensor in inputs}
    return all(_place(tensor) in storages for tensor in outputs)


def _kernel(function: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Kernel:
    packet = function._overloadpacket
    count = flop_registry.get(packet)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=output))
    inputs, outputs = _tensors((args, kwargs)), _tensors(output)
    touched = {id(tensor): _bytes(tensor) for tensor in (*inputs, *outputs)}
    if packet.__name__ in _GATHERS:
        moved = (_bytes(tensor) for tensor in (*inputs, *outputs) if tensor.dtype is not torch.int64)
        rows = min(moved, default=0)
        return Kernel(packet.__name__, 2 * rows)
    return Kernel(packet.__name__, sum(touched.values()), flops)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor shows; those that are broadcast count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()
