"""All-reduces of small tensors through PyTorch's symmetric memory, among GPUs of one host.

A row-parallel layer ends in an all-reduce, of 8 KB for one token of an 8B model. NCCL takes longer to begin so small a
sum than to move it. With `torch.distributed._symmetric_memory` every rank maps a buffer of each other rank, and one
kernel waits for the others and adds. `kind_of` says which kernel takes which size; NCCL keeps the largest.

All ranks get equal bits:

- One shot: every rank reads the numbers of all ranks, and adds them in the order of ranks.
- Two-shot: each number is added by one rank, in that order, and this rank writes the sum to all.
- NCCL: each sum is completed in one place, and copied from there. Its order depends on the size.

So one row has the same sums beside any others until NCCL takes over. `load_and_reduce` in PyTorch's
`CUDASymmetricMemory-inl.cuh` is that order. The sums of the NVLink switch (`multimem_all_reduce_`) are left out,
because nobody states theirs.

Nobody has run this on GPUs, so `target.symmetric_memory` is off by default. On CPUs, tests show that all ranks agree
whether to use it; `pytest -m cuda` has the rest. `compile: off` leaves everything to NCCL, too. These kernels wait
for a lost rank without a bound: the owner of the ranks ends all of them when one has died, or after
`target.step_timeout_seconds`.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum, auto
from hashlib import blake2b
from typing import Protocol

import torch
from torch import distributed

from workers.ranks import UNBOUNDED, Wait, begin_sums_with, is_equal_on_all, sum_over_ranks, try_together

logger = logging.getLogger(__name__)


class AllReduce(Enum):
    """What sums a tensor over ranks."""

    ONE_SHOT = auto()
    TWO_SHOT = auto()
    NCCL = auto()


_MOST_BYTES = 10 << 20
"""Most bytes that PyTorch gives to its two-shot kernel: `kTwoShotThreshBytes` in its `intra_node_comm.cu`."""
_MOST_IN_ONE_SHOT = {2: _MOST_BYTES, 4: 512 << 10, 8: 256 << 10}
"""Most bytes in one shot, by the most ranks for which they hold: vLLM's bounds, in its `custom_all_reduce.cuh`.

PyTorch's own is 256 KB for any ranks. Two ranks send as many bytes in one shot as in two."""


def kind_of(size: int, ranks: int) -> AllReduce:
    """What sums tensors of `size` bytes over `ranks` ranks of one host. A pure function, so all ranks do the same."""
    if not 2 <= ranks <= max(_MOST_IN_ONE_SHOT) or size > _MOST_BYTES:
        return AllReduce.NCCL
    most = next(most for count, most in _MOST_IN_ONE_SHOT.items() if ranks <= count)
    return AllReduce.ONE_SHOT if size <= most else AllReduce.TWO_SHOT


class SmallSums(Protocol):
    """Sums small tensors over all ranks. Making it does what a rank does alone: checks, and its buffer."""

    def connect(self) -> None:
        """Meet the other ranks, which call this together. May raise anything."""

    def begin(self, part: torch.Tensor) -> Wait | None:
        """See `workers.ranks.BeginSum`."""


class SymmetricSums:
    """Sums through a buffer in symmetric memory. What a CUDA graph captures refers to the buffer: it is never moved."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the buffer of `_MOST_BYTES` for numbers of one type.

        Raises `RuntimeError` for a type other than float32 and bfloat16, a GPU without an NVLink switch, or without
        memory.
        """
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory as symmetric

        if dtype not in (torch.float32, torch.bfloat16):
            raise RuntimeError(f"PyTorch's kernels do not add {dtype}")
        # Only a switch multicasts. It joins all GPUs of the host, those that this process does not see as well.
        if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index):
            raise RuntimeError("the GPUs are not joined by an NVLink switch that multicasts (Hopper and later)")
        # Ray shows each rank one GPU, number 0 of all ranks, which PyTorch takes for one GPU of several ranks.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self._buffer = symmetric.empty(_MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
        self._group = distributed.distributed_c10d._get_default_group().group_name
        self._ranks = distributed.get_world_size()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def connect(self) -> None:
        """Map the buffers of all ranks. Raises `RuntimeError`.

        A rank that fails meanwhile makes the others wait in the store, for `_CONNECT`. PyTorch does not bound the wait
        for a rank that is lost between two steps of this.
        """
        from torch.distributed import _symmetric_memory as symmetric

        with bounded_store(_CONNECT):
            symmetric.rendezvous(self._buffer, self._group)

    def begin(self, part: torch.Tensor) -> Wait | None:
        """Begin the sum on a stream of its own, as NCCL does. `None` for what the kernels do not take."""
        kind = kind_of(part.nbytes, self._ranks)
        is_aligned = (part.nbytes | int(part.storage_offset()) * part.itemsize) % _ALIGNMENT == 0
        if kind is AllReduce.NCCL or part.dtype is not self._buffer.dtype or not (is_aligned and part.is_contiguous()):
            return None
        numbers, shared, device = part.view(-1), self._buffer[: part.numel()], part.device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            # A launch of its own: where the kernel copies, it tells others so before all of its warps have.
            shared.copy_(numbers)
            if kind is AllReduce.ONE_SHOT:
                torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", self._group, numbers)
            else:
                torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group)
                numbers.copy_(shared)
            ended = self._stream.record_event()
        return lambda: torch.cuda.current_stream(device).wait_event(ended)


_ALIGNMENT = 16
"""Bytes that the kernels read at once. The begin of a tensor and its size are multiples."""
_CONNECT = timedelta(seconds=60)
"""Longest wait for another rank while the ranks connect, one of which may fail."""


@contextmanager
def bounded_store(limit: timedelta) -> Iterator[None]:
    """Inside, waiting in the group's store for another rank raises `DistStoreError` after `limit`."""
    group = distributed.distributed_c10d._get_default_group()
    store = distributed.distributed_c10d._get_process_group_store(group)
    store.set_timeout(limit)
    try:
        yield
    finally:
        store.set_timeout(UNBOUNDED)


def reduce_through_symmetric_memory(
    dtype: torch.dtype,
    device: torch.device,
    ranks: int,
    make: Callable[[torch.dtype, torch.device], SmallSums] = SymmetricSums,
) -> bool:
    """From now on, sum small tensors of this type through symmetric memory, if it passes a trial on all ranks.

    All ranks call this together, before CUDA graphs are captured and before the KV pool takes what memory is left.
    Returns whether they do, the same on all of them. Logs why not; the process group then sums everything.
    """
    try:
        if kind_of(0, ranks) is AllReduce.NCCL:
            raise RuntimeError(f"needed 2 to {max(_MOST_IN_ONE_SHOT)} ranks, found {ranks}")
        if not is_equal_on_all(platform.node(), ranks):
            raise RuntimeError("the ranks are on several hosts")
        sums = try_together(lambda: make(dtype, device), ranks)
        try_together(sums.connect, ranks)
        digest = try_together(lambda: _try(sums, dtype, device), ranks)
        if not is_equal_on_all(digest, ranks):
            raise RuntimeError("ranks get sums of other bits than others")
    except Exception as error:  # drivers may raise anything
        logger.warning("target.symmetric_memory: on has no effect, NCCL sums everything: %r", error)
        return False
    begin_sums_with(sums.begin)
    logger.info("all-reduces of up to %d MiB go through symmetric memory", _MOST_BYTES >> 20)
    return True


_TRIED = (4112, 200 << 10, (1 << 20) + 48)
"""Bytes of the tensors of the trial: of one block of a kernel and of many, in one shot and in two."""


def _try(sums: SmallSums, dtype: torch.dtype, device: torch.device) -> str:
    """A digest of sums of drawn numbers.

    Raises `RuntimeError` if integers, whose sums no order changes, have other sums than those of the process group.
    """
    rank, digest, is_right = distributed.get_rank(), blake2b(digest_size=16), True
    generator = torch.Generator().manual_seed(rank)
    for size in _TRIED:
        count = size // dtype.itemsize
        integers = (torch.arange(count) + rank) % 16
        for numbers in (integers, torch.randn(count, generator=generator)):
            part = numbers.to(device, dtype)
            expected = part.clone()
            sum_over_ranks(expected)  # asks whether all ranks are here
            wait = sums.begin(part)
            if wait is not None:
                wait()
            is_right &= numbers is not integers or torch.equal(part, expected)
            digest.update(part.cpu().view(torch.uint8).numpy().tobytes())
    if not is_right:
        raise RuntimeError("it adds otherwise than the process group")
    return digest.hexdigest()
