"""Copies within a pool: slots of accepted nodes to their positions, and blocks that several sequences share."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate, chain, product
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from workers.kv.allocator import BlockCopy
from workers.transfer import launch_on, to_device, to_device_together


class Path(NamedTuple):
    """Slots of one block table that are copied together: all sources are read before any destination is written.

    Both ascend by position, and no source lies before its destination.
    """

    sources: list[int]
    destinations: list[int]


class CopyKernels(Protocol):
    """The module `workers.kv.triton.entries`."""

    def records_of(self, stacks: Sequence[torch.Tensor]) -> Any:
        """What `copy_paths` reads of the records of stacks."""

    def copy_paths(
        self,
        records: Any,
        ends: torch.Tensor,
        sources: torch.Tensor,
        destinations: torch.Tensor,
        slots: int = 1,
    ) -> None:
        """Copy entries of so many slots along paths, in one launch."""


class StackCopies:
    """Copies within stacks `[records, blocks, block size, …]`: by PyTorch, or on a GPU with Triton in one launch."""

    def __init__(
        self, stacks: Sequence[torch.Tensor], device: torch.device, kernels: CopyKernels | None = None
    ) -> None:
        """`kernels` copy in place of Triton's, on any device."""
        self._stacks = stacks
        self._device = device
        self._kernels = kernels
        self._records: Any = None
        """Where the stacks are, once the kernel has copied something."""

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel copies: on an NVIDIA GPU where the package `triton` is installed."""
        if self._kernels is not None:
            return True
        return self._device.type == "cuda" and len(self._stacks) > 0 and find_spec("triton") is not None

    @torch.inference_mode()
    def copy_paths(self, paths: Sequence[Path]) -> None:
        """Copy slots. Paths have no slot in common."""
        if self.has_kernel:
            self._launch(paths, slots=1)
            return
        chosen = (list(chain.from_iterable(slots)) for slots in zip(*paths, strict=True))
        sources, destinations = (to_device(slots, self._device) for slots in chosen)
        copy_entries([stack.flatten(1, 2) for stack in self._stacks], sources, destinations)

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks. No destination is a source."""
        if self.has_kernel:
            paths = [Path([copy.source], [copy.destination]) for copy in copies]
            self._launch(paths, slots=self._stacks[0].shape[2])
            return
        if self._device.type == "cpu":  # without index tensors this is faster
            for copy, stack in product(copies, self._stacks):
                stack[:, copy.destination] = stack[:, copy.source]
            return
        sources, destinations = (
            to_device(blocks, self._device)
            for blocks in ([copy.source for copy in copies], [copy.destination for copy in copies])
        )
        copy_entries(self._stacks, sources, destinations)

    def warm_up(self) -> None:
        """Let the kernel be compiled. Copies nothing."""
        if self.has_kernel:
            for slots in (1, self._stacks[0].shape[2]):
                self._launch([Path([0], [0])], slots)

    def _launch(self, paths: Sequence[Path], slots: int) -> None:
        launch_on(self._device)  # a step copies before its pass, which chooses the thread's device as well
        if self._kernels is None:
            from workers.kv.triton import entries

            self._kernels = entries
        if self._records is None:
            self._records = self._kernels.records_of(self._stacks)
        ends = np.array([0, *accumulate(len(path.sources) for path in paths)], dtype=np.int64)
        entry_lists = (list(chain.from_iterable(one)) for one in zip(*paths, strict=True))
        arrays = [ends, *(np.array(one, dtype=np.int64) for one in entry_lists)]
        listed, sources, destinations = to_device_together(arrays, self._device)
        self._kernels.copy_paths(self._records, listed, sources, destinations, slots)


def follow(copies: Sequence[BlockCopy], noted: Sequence[BlockCopy]) -> bool:
    """Whether some of `copies` must be made after those noted: a block was freed meanwhile, and is taken again."""
    read, written = {copy.source for copy in copies}, {copy.destination for copy in copies}
    return any(one.source in written or one.destination in read | written for one in noted)


def copy_entries(stacks: Sequence[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy entries `sources` of stacks `[records, entries, …]` to `destinations`, int64 `[n]` each.

    All sources are read before any destination is written.
    """
    for stack in stacks:
        stack[:, destinations] = stack[:, sources]
