"""Offload tiers for evicted KV blocks: host memory, then a directory on disk.

A cached block is saved when the pool evicts it, and loaded when a new sequence has its prefix. The content of a key
never changes. So a tier retains its copy when the block returns to the pool, and saving the block again costs
nothing. Each tier evicts the least recently used block first.

A block that cannot be read back is a cache miss, and its tokens are computed again. A fault of a tier never
changes a result.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial

import psutil
import torch
from torch import Tensor

from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from workers.kv.disk import DiskTier, TierCounts
from workers.kv.load_cost import CostModel, Medium
from workers.transfer import DeviceTimer

logger = logging.getLogger(__name__)

Agree = Callable[[int], int]
"""Returns the smallest of all ranks' numbers, on every rank. All ranks must call it equally often."""


def agreed_length(longest: Callable[[int], int], max_length: int, agree: Agree) -> int:
    """The longest prefix length, at most `max_length`, that every rank can open a sequence with.

    `longest(bound)` is this rank's longest length from 0 to `bound`; it returns `bound` whenever it can.
    The pool and the host tier hold the same blocks on every rank, since all ranks make the same calls. The disk tier
    and the measured loading speed may differ, so ranks must agree here. Loading may still fail on one rank: the
    ranks agree on its success afterwards, and free the blocks unless all succeeded.
    """
    bound = max_length
    while bound > 0:
        found = agree(longest(bound))
        if found == bound:
            break
        bound = found
    return bound


class Tiers:
    """The offload tiers of one rank's pool. Used only by the thread that runs the steps.

    `parts` is a block's content: contiguous tensors, always in the same order and of the same sizes. The pool passes
    views of the block's keys in every layer, then of its values.
    """

    def __init__(self, section: KvSection, block_bytes: int, device: torch.device) -> None:
        self.costs = CostModel()
        self._block_bytes = block_bytes
        self._device = device
        self._host_bytes = section.host_bytes
        self._disk = DiskTier(section.disk_directory, section.disk_bytes) if section.disk_directory else None
        self._host: _HostTier | None = None
        self._timings: deque[tuple[DeviceTimer, Callable[[float], None]]] = deque()
        """What the device may not have done yet, in its order, and what records how long it took."""

    def start(self) -> None:
        """Allocate the host memory and make the directory. Raises `ConfigurationError` if memory is too small."""
        if self._host_bytes > (available := psutil.virtual_memory().available):
            raise ConfigurationError(
                f"target.kv.host_bytes: {self._host_bytes} is refused; it must be at most the memory that is "
                f"available, {available}"
            )
        if self._host_bytes >= self._block_bytes:
            self._host = _HostTier(self._host_bytes, self._block_bytes, pinned=self._device.type == "cuda")
        if self._disk is not None:
            self._disk.start()

    def close(self) -> None:
        """Drop every block and remove the directory. Closing again does nothing."""
        if self._host is not None:
            logger.debug("blocks in host memory: %s; on disk: %s", self.host, self.disk)
        self._host = None
        self._timings.clear()
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> Tiers:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def host(self) -> TierCounts:
        """Counts of blocks saved to, loaded from and dropped by host memory."""
        return self._host.counts if self._host is not None else TierCounts()

    @property
    def disk(self) -> TierCounts:
        """Counts of blocks saved to, loaded from and dropped by the disk."""
        return self._disk.counts if self._disk is not None else TierCounts()

    def find(self, key: bytes) -> bool:
        """Whether a tier holds the block. The lookup does not count as a use."""
        return self._medium(key) is not None

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark these blocks as most recently used, so that blocks saved to make room for them do not evict them."""
        for key in keys:
            if self._host is not None:
                self._host.touch(key)
            if self._disk is not None:
                self._disk.touch(key)

    def flush(self) -> None:
        """Block until all queued blocks are written to disk."""
        if self._disk is not None:
            self._disk.flush()

    def record_compute(self, tokens: int, prompt_tokens: int, timer: DeviceTimer) -> None:
        """Record how long a step takes, once the device has computed it; see `CostModel.record_compute`."""
        self._timings.append((timer, partial(self.costs.record_compute, tokens, prompt_tokens)))
        self._collect_timings()

    def worth_loading(self, keys: Sequence[bytes], tokens: int) -> bool:
        """Whether loading these blocks takes less time than computing the `tokens` they hold."""
        self._collect_timings()
        media = [medium for medium in map(self._medium, keys) if medium is not None]
        return self.costs.worth_loading(
            media.count(Medium.HOST) * self._block_bytes, media.count(Medium.DISK) * self._block_bytes, tokens
        )

    def save(self, key: bytes, parts: Sequence[Tensor]) -> None:
        """Save a copy of the block's content. On CUDA the copy is queued on the current stream.

        Raises `ValueError` if the content does not have a block's size.
        """
        if sum(part.nbytes for part in parts) != self._block_bytes:
            raise ValueError(f"a block has {self._block_bytes} bytes, not {sum(part.nbytes for part in parts)}")
        if self._host is None:
            if self._disk is not None and self._disk.wants(key):
                self._disk.save(key, torch.cat([_as_bytes(part) for part in parts]).cpu())
            return
        if self._host.touch(key):
            return
        victim = self._host.next_victim()
        if victim is not None and self._disk is not None and self._disk.wants(victim):
            self._synchronize()  # the copy into this slot may still be running
            self._disk.save(victim, self._host.read(victim).clone())
        self._host.save(key, parts)

    def load(self, key: bytes, parts: Sequence[Tensor]) -> bool:
        """Copy the block's content into `parts`, queued as for `save`. Returns `False` if no tier has it."""
        if self._host is not None and self._host.touch(key):
            with DeviceTimer(self._device) as timer:
                _scatter(self._host.load(key).to(self._device, non_blocking=True), parts)
            self._timings.append((timer, partial(self.costs.record_load, Medium.HOST, self._block_bytes)))
            return True
        if self._disk is None:
            return False
        begun = time.perf_counter()
        content = self._disk.load(key)
        if content is None or content.nbytes != self._block_bytes:
            return False
        _scatter(content.to(self._device), parts)
        self.costs.record_load(Medium.DISK, self._block_bytes, time.perf_counter() - begun)
        return True

    def _medium(self, key: bytes) -> Medium | None:
        if self._host is not None and key in self._host:
            return Medium.HOST
        return Medium.DISK if self._disk is not None and key in self._disk else None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _collect_timings(self) -> None:
        """Record the times of what the device has done."""
        while self._timings and (seconds := self._timings[0][0].seconds) is not None:
            _, record = self._timings.popleft()
            record(seconds)


class _HostTier:
    """Host memory in slots of a block's size, allocated once."""

    def __init__(self, host_bytes: int, block_bytes: int, pinned: bool) -> None:
        self.counts = TierCounts()
        self._memory = [
            slot
            for size in (_powers_of_two(host_bytes) if pinned else [host_bytes])
            for slot in torch.empty(
                (size // block_bytes, block_bytes), dtype=torch.uint8, pin_memory=pinned and size >= block_bytes
            ).unbind()
        ]
        self._free = list(reversed(range(len(self._memory))))
        self._slots: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def touch(self, key: bytes) -> bool:
        """Mark the block as most recently used. Returns `False` if it is not here."""
        if key not in self._slots:
            return False
        self._slots.move_to_end(key)
        return True

    def next_victim(self) -> bytes | None:
        """The block that the next save evicts, the least recently used one; `None` if a slot is free."""
        return None if self._free else next(iter(self._slots))

    def read(self, key: bytes) -> Tensor:
        """The slot of a block `[bytes]`."""
        return self._memory[self._slots[key]]

    def load(self, key: bytes) -> Tensor:
        """The content of a block `[bytes]`. Counts as a load."""
        self.counts.loaded += 1
        return self.read(key)

    def save(self, key: bytes, parts: Sequence[Tensor]) -> None:
        """Copy the content to a free slot, or to the slot of the next victim."""
        victim = self.next_victim()
        if victim is None:
            slot = self._free.pop()
        else:
            slot = self._slots.pop(victim)
            self.counts.dropped += 1
        flat = [_as_bytes(part) for part in parts]
        if flat[0].device.type == "cpu":
            torch.cat(flat, out=self._memory[slot])
        else:  # one copy over the bus instead of one per layer
            self._memory[slot].copy_(torch.cat(flat), non_blocking=True)
        self._slots[key] = slot
        self.counts.saved += 1


def _powers_of_two(number: int) -> list[int]:
    """The powers of two that sum up to `number`: torch rounds other sizes of pinned memory up."""
    return [1 << bit for bit in reversed(range(number.bit_length())) if number >> bit & 1]


def _as_bytes(part: Tensor) -> Tensor:
    """A view of the same memory as bytes `[n]`."""
    return part.view(-1).view(torch.uint8)


def _scatter(content: Tensor, parts: Sequence[Tensor]) -> None:
    for source, part in zip(content.split_with_sizes([part.nbytes for part in parts]), parts, strict=True):
        _as_bytes(part).copy_(source)
