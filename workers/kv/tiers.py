"""Where blocks of keys and values go that the pool has no place for: host memory, then a directory on disk.

A block is saved when the pool takes it for something else while it is cached, and copied back when a sequence
that begins alike is opened. What lies under a key never changes, so a tier keeps its copy when the block returns
to the pool, and saving it again costs nothing. The least recently used block goes first.

A tier costs memory and never an answer: whatever cannot be read back is a miss, and its tokens are computed.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from types import TracebackType

import psutil
import torch
from torch import Tensor

from cluster.core.config import KvSection
from cluster.core.errors import ConfigurationError
from workers.kv.disk import DiskTier, TierCounts
from workers.kv.load_cost import CostModel, Medium

logger = logging.getLogger(__name__)

Agree = Callable[[int], int]
"""Least of all ranks' numbers, the same on each of them. Every rank must call it equally often."""


def alone(number: int) -> int:
    """`Agree` of a target that is one rank."""
    return number


def agreed_length(longest: Callable[[int], int], most: int, agree: Agree) -> int:
    """The longest length, at most `most`, that every rank can open a sequence with.

    `longest(bound)` is this rank's answer: a length from 0 to `bound`, and `bound` itself where that can be had.
    What the pool and the host hold is the same on every rank, since all of them obey the same calls; what the
    disk still gives and what is worth loading is not. So a rank that asks the tiers asks through here. Loading
    may still fail on one of them: `agree(1 or 0)` afterwards, and without all of them the blocks are given back.
    """
    bound = most
    while bound > 0:
        found = agree(longest(bound))
        if found == bound:
            break
        bound = found
    return bound


class Tiers:
    """The tiers behind one rank's pool. For one thread: the one that runs the steps.

    `parts` is a block's content: contiguous tensors, in an order and of sizes that are always the same, such as
    the views `[block_size, kv_heads, head_dim]` of its keys in every layer and then of its values.
    """

    def __init__(
        self, section: KvSection, block_bytes: int, device: torch.device, costs: CostModel | None = None
    ) -> None:
        self.costs = costs or CostModel()
        self._block_bytes = block_bytes
        self._device = device
        self._host_bytes = section.host_bytes
        self._disk = DiskTier(section.disk_directory, section.disk_bytes) if section.disk_directory else None
        self._host: _HostTier | None = None
        self._timings: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        """Take the host memory and the directory. Raises `ConfigurationError` when there is not so much memory."""
        if self._host_bytes > psutil.virtual_memory().available:
            raise ConfigurationError(f"kv.host_bytes: {self._host_bytes} is more than the memory that is available")
        if self._host_bytes >= self._block_bytes:
            self._host = _HostTier(self._host_bytes, self._block_bytes, pinned=self._device.type == "cuda")
        if self._disk is not None:
            self._disk.start()

    def close(self) -> None:
        """Forget every block and remove the directory. Closing twice is harmless."""
        if self._host is not None:
            logger.debug("blocks in host memory: %s; on disk: %s", self.host, self.disk)
        self._host = None
        self._timings.clear()
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> Tiers:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def host(self) -> TierCounts:
        """Blocks that went to host memory and came back."""
        return self._host.counts if self._host is not None else TierCounts()

    @property
    def disk(self) -> TierCounts:
        """Blocks that went to disk and came back."""
        return self._disk.counts if self._disk is not None else TierCounts()

    def find(self, key: bytes) -> bool:
        """Whether the block is in some tier. Looking does not make it recently used."""
        return self._medium(key) is not None

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make these blocks the last to go: making room for them in the pool may save others first."""
        for key in keys:
            if self._host is not None:
                self._host.touch(key)
            if self._disk is not None:
                self._disk.touch(key)

    def flush(self) -> None:
        """Return once nothing waits to be written to disk."""
        if self._disk is not None:
            self._disk.flush()

    def worth_loading(self, keys: Sequence[bytes], tokens: int) -> bool:
        """Whether copying these blocks back takes less time than computing the `tokens` they hold."""
        self._collect_timings()
        media = [medium for medium in map(self._medium, keys) if medium is not None]
        return self.costs.worth_loading(
            media.count(Medium.HOST) * self._block_bytes, media.count(Medium.DISK) * self._block_bytes, tokens
        )

    def save(self, key: bytes, parts: Sequence[Tensor]) -> None:
        """Keep a copy of the block's content. On CUDA it is queued on the current stream, and so ordered.

        Raises `ValueError` for content of another size than a block's.
        """
        if sum(part.nbytes for part in parts) != self._block_bytes:
            raise ValueError(f"a block has {self._block_bytes} bytes, not {sum(part.nbytes for part in parts)}")
        if self._host is None:
            if self._disk is not None and self._disk.wants(key):
                self._disk.save(key, torch.cat([_as_bytes(part) for part in parts]).cpu())
            return
        if self._host.touch(key):
            return
        displaced = self._host.displaced()
        if displaced is not None and self._disk is not None and self._disk.wants(displaced):
            self._synchronize()  # the copy into this place may still be under way
            self._disk.save(displaced, self._host.read(displaced).clone())
        self._host.save(key, parts)

    def load(self, key: bytes, parts: Sequence[Tensor]) -> bool:
        """Copy the block's content into `parts`, queued as for `save`; `False` if it is gone."""
        if self._host is not None and self._host.touch(key):
            begun = time.perf_counter()
            with _CudaTimer(self._device, self._timings):
                _scatter(self._host.load(key).to(self._device, non_blocking=True), parts)
            if self._device.type != "cuda":
                self.costs.record_load(Medium.HOST, self._block_bytes, time.perf_counter() - begun)
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
        """Note the copies that the device has finished."""
        while self._timings and self._timings[0][1].query():  # type: ignore[no-untyped-call]
            begun, ended = self._timings.popleft()
            self.costs.record_load(Medium.HOST, self._block_bytes, begun.elapsed_time(ended) / 1000)


class _HostTier:
    """Host memory in places of a block's size, taken once."""

    def __init__(self, host_bytes: int, block_bytes: int, pinned: bool) -> None:
        self.counts = TierCounts()
        self._memory = [
            place
            for size in (_powers_of_two(host_bytes) if pinned else [host_bytes])
            for place in torch.empty(
                (size // block_bytes, block_bytes), dtype=torch.uint8, pin_memory=pinned and size >= block_bytes
            ).unbind()
        ]
        self._free = list(reversed(range(len(self._memory))))
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def touch(self, key: bytes) -> bool:
        """Make the block the most recently used one; `False` if it is not here."""
        if key not in self._places:
            return False
        self._places.move_to_end(key)
        return True

    def displaced(self) -> bytes | None:
        """The block that the next one to be saved takes the place of."""
        return None if self._free else next(iter(self._places))

    def read(self, key: bytes) -> Tensor:
        """The place of a block `[bytes]`."""
        return self._memory[self._places[key]]

    def load(self, key: bytes) -> Tensor:
        """The content of a block `[bytes]`, counted."""
        self.counts.loaded += 1
        return self.read(key)

    def save(self, key: bytes, parts: Sequence[Tensor]) -> None:
        """Copy the content to a free place, or to that of the least recently used block."""
        if self._free:
            place = self._free.pop()
        else:
            _, place = self._places.popitem(last=False)
            self.counts.dropped += 1
        flat = [_as_bytes(part) for part in parts]
        if flat[0].device.type == "cpu":
            torch.cat(flat, out=self._memory[place])
        else:  # one copy over the bus instead of one per layer
            self._memory[place].copy_(torch.cat(flat), non_blocking=True)
        self._places[key] = place
        self.counts.saved += 1


class _CudaTimer:
    """Marks when the device begins and ends what is queued inside; elsewhere it does nothing."""

    def __init__(self, device: torch.device, timings: deque[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self._timings = timings
        self._events = (_event(), _event()) if device.type == "cuda" else None

    def __enter__(self) -> None:
        if self._events is not None:
            self._events[0].record()

    def __exit__(self, *_: object) -> None:
        if self._events is not None:
            self._events[1].record()
            self._timings.append(self._events)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _powers_of_two(number: int) -> list[int]:
    """Those whose sum it is: pinned memory is given out in such sizes, others are rounded up."""
    return [1 << bit for bit in reversed(range(number.bit_length())) if number >> bit & 1]


def _as_bytes(part: Tensor) -> Tensor:
    """The same memory as `[bytes]`."""
    return part.view(-1).view(torch.uint8)


def _scatter(content: Tensor, parts: Sequence[Tensor]) -> None:
    for source, part in zip(content.split_with_sizes([part.nbytes for part in parts]), parts, strict=True):
        _as_bytes(part).copy_(source)
