"""The paged KV pool: every layer's keys and values, in blocks that `BlockAllocator` hands out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import psutil
import torch
from torch import distributed

from cluster.core.config import KvSection, PoolSection
from cluster.core.errors import ConfigurationError, KvPoolExhausted
from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout, KvOccupancy
from workers.kv.allocator import BlockAllocator
from workers.kv.block_table import BlockTable, Prefix
from workers.kv.groups import KvCacheGroups, group_layers
from workers.kv.huge_pages import huge_pages
from workers.kv.spec import KvCacheSpec
from workers.kv.tiers import Tiers, agreed_length
from workers.kv.transfer import to_device

_MOST_BLOCKS = 1 << 22

_Search = Callable[[int, Callable[[bytes], bool] | None], Prefix]
"""The longest beginning, of so many tokens at most, that the pool or something else has."""


def blocks_that_fit(spec: KvCacheSpec, section: PoolSection, truncatable: bool = False) -> int:
    """How many blocks the configured bytes, or the fraction of free memory, hold on this rank.

    Raises `ConfigurationError` when not even one fits.
    """
    budget = section.pool_bytes
    if budget is None:
        budget = int(_free_bytes(spec.device) * section.memory_fraction)
    size = block_bytes(group_layers(spec, section, truncatable), spec.dtype)
    blocks = min(budget // size, _MOST_BLOCKS)
    if blocks < 1:
        raise ConfigurationError(
            f"kv.pool_bytes: a block of {section.block_size} tokens takes {size} bytes and {budget} are given"
        )
    return int(blocks)


def block_bytes(kv_groups: KvCacheGroups, dtype: torch.dtype) -> int:
    """Bytes of keys and values in one block on this rank."""
    elements = sum(2 * shape.kv_heads * shape.head_dim for shape in kv_groups.block_layers)
    return elements * dtype.itemsize * kv_groups.layout.block_size


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


def _stored(
    spec: KvCacheSpec, kv_groups: KvCacheGroups, blocks: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of each slot, `[blocks, block_size, heads, dim]`, and the stacks of those alike that they are in.

    A stack is copied within in one go, however many layers there are.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for slot, shape in enumerate(kv_groups.block_layers):
        alike.setdefault((shape.kv_heads, shape.head_dim), []).append(slot)
    keys, values = ([torch.empty(0)] * len(kv_groups.block_layers) for _ in range(2))
    stacks: list[torch.Tensor] = []
    for (heads, dim), slots in alike.items():
        # Zeros, not garbage: a masked position is multiplied by zero, and zero times NaN is NaN.
        size = (2 * len(slots), blocks, kv_groups.layout.block_size, heads, dim)
        stacks.append(_zeros(size, spec.dtype, spec.device))
        for place, slot in enumerate(slots):
            keys[slot], values[slot] = stacks[-1][2 * place], stacks[-1][2 * place + 1]
    return keys, values, stacks


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or not prod(size):
        return torch.zeros(size, dtype=dtype, device=device)
    return huge_pages(prod(size) * dtype.itemsize).view(dtype).view(size)


class KvPool:
    """Keys and values of all sequences on this rank; `keys[slot]` is `[blocks, block_size, heads, dim]`.

    `kv_groups.placements[layer]` says which table and which slot are a layer's. Under tensor parallelism the heads
    are this rank's own, and `blocks` must be the same on every rank. Cached blocks that are taken for something
    else go to the tiers, where some are configured; `close` frees those. A pool that `truncatable` can truncate
    sequences to any length, and caches nothing.
    """

    def __init__(
        self, spec: KvCacheSpec, section: PoolSection, blocks: int | None = None, *, truncatable: bool = False
    ) -> None:
        self.kv_groups = group_layers(spec, section, truncatable)
        blocks_total = blocks_that_fit(spec, section, truncatable) if blocks is None else blocks
        keeping = section if isinstance(section, KvSection) and section.prefix_cache and not truncatable else None
        self._allocator = BlockAllocator(blocks_total, self.kv_groups.layout, keeping is not None, self._save)
        self._device = spec.device
        self._ranks = spec.tensor_parallel

        self.keys, self.values, self._stacks = _stored(spec, self.kv_groups, blocks_total + spec.scratch_blocks)
        self._tiers: Tiers | None = None  # last: whoever fails before has nothing to close
        if keeping is not None and (keeping.host_bytes or keeping.disk_directory):
            self._tiers = Tiers(keeping, block_bytes(self.kv_groups, spec.dtype), spec.device)
            self._tiers.start()

    def close(self) -> None:
        """Forget what was moved out. Closing twice is harmless."""
        if self._tiers is not None:
            self._tiers.close()

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._allocator.block_size

    @property
    def layout(self) -> KvLayout:
        """How sequences take blocks."""
        return self._allocator.layout

    @property
    def is_lossless(self) -> bool:
        """True unless a configured window hides positions that the model would see."""
        return self.kv_groups.is_lossless

    @property
    def blocks_total(self) -> int:
        """Blocks in the pool."""
        return self._allocator.blocks_total

    @property
    def scratch(self) -> BlockId:
        """Where passes are replayed, one block more: it takes what their frames have to spare, and is nobody's."""
        return BlockId(self.blocks_total)

    @property
    def blocks_free(self) -> int:
        """Blocks that no sequence holds; the cache's give way."""
        return self._allocator.blocks_free

    @property
    def tiers(self) -> Tiers | None:
        """Where blocks go that the pool has no place for."""
        return self._tiers

    def occupancy(self) -> KvOccupancy:
        """The pool as the coordinator hears of it."""
        return KvOccupancy(self.blocks_total, self.blocks_free)

    def new_table(self, salt: str = "") -> BlockTable:
        """An empty sequence."""
        return self._allocator.new_table(salt)

    def open(self, tokens: Sequence[int], salt: str = "", parent: BlockTable | None = None) -> BlockTable:
        """A new sequence with as many of the leading `tokens` as are stored already, but for the last one.

        Shares the blocks of the parent and of the cache, and brings back those that were moved out where there is
        room for them and copying is sooner done than computing.
        """
        most = len(tokens) - 1
        chain: list[bytes] = []

        def search(most: int, elsewhere: Callable[[bytes], bool] | None = None) -> Prefix:
            return self._allocator.find(tokens, salt, parent, most, elsewhere, chain)

        kept = search(most)
        if self._tiers is not None and len(kept) < most:
            longer = self._open_with_tiers(self._tiers, search, most, kept)
            if longer is not None:
                return longer
            kept = search(most)  # making room for what did not come may have taken blocks
        return self._allocator.adopt(kept)[0]

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """A table of its own that begins with the first `length` stored tokens of `table`; takes no block yet.

        Raises `ValueError` where the pool has let go of what so short a sequence sees.
        """
        return self._allocator.fork(table, length)

    def record_compute(self, tokens: int, prompt_tokens: int, seconds: float, *, awaited: bool) -> None:
        """What loading blocks is to be compared with: see `CostModel.record_compute`."""
        if self._tiers is not None:
            self._tiers.costs.record_compute(tokens, prompt_tokens, seconds, awaited=awaited)

    def reserve(self, table: BlockTable, length: int) -> None:
        """Make room for `length` tokens and own the part beyond `table.stored_len`.

        Raises `KvPoolExhausted`, having changed nothing.
        """
        copies = self._allocator.reserve(table, length)
        if not copies:
            return
        if self._device.type == "cpu":  # block by block there is nothing to gather
            for copy, stack in product(copies, self._stacks):
                stack[:, copy.destination] = stack[:, copy.source]
            return
        sources, destinations = (
            to_device(blocks, self._device)
            for blocks in ([copy.source for copy in copies], [copy.destination for copy in copies])
        )
        for stack in self._stacks:
            stack[:, destinations] = stack[:, sources]

    def commit(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """`tokens` are what the next positions hold, for good; what lies beyond them is free."""
        self._allocator.commit(table, tokens)

    def truncate(self, table: BlockTable, length: int) -> None:
        """Free what lies beyond `length` tokens. Below `table.stored_len` only where the pool truncatable."""
        self._allocator.truncate(table, length)

    def release(self, table: BlockTable) -> None:
        """Free everything the table holds."""
        self._allocator.release(table)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `keys`, `values` `[tokens, heads, dim]` at `slots` `[tokens]` of the layer's table.

        What is no number is stored as one: a freed block may be read, masked, by the next sequence that gets it.
        """
        slot = self.kv_groups.placements[layer].block_layer
        for store, fresh in ((self.keys[slot], keys), (self.values[slot], values)):
            store.view(-1, *store.shape[2:]).index_copy_(0, slots, fresh.nan_to_num())

    def move(self, table: BlockTable, start: int, nodes: Sequence[int]) -> None:
        """Copy positions `start + nodes[0], start + nodes[1], …` to `start, start + 1, …` in every layer.

        All are read before any is written.
        """
        size = self.block_size
        sources, destinations = (
            to_device(
                [
                    blocks[position // size] * size + position % size
                    for blocks in table.blocks
                    for position in positions
                ],
                self._device,
            )
            for positions in ([start + node for node in nodes], range(start, start + len(nodes)))
        )
        for stack in self._stacks:
            flat = stack.flatten(1, 2)
            flat[:, destinations] = flat[:, sources]

    def _open_with_tiers(self, tiers: Tiers, search: _Search, most: int, kept: Prefix) -> BlockTable | None:
        """`None` where nothing more is to be had than `kept`, or it was lost on the way."""

        def longest(bound: int) -> int:
            prefix = search(bound, tiers.find)
            missing = [key for key, _, _ in prefix.elsewhere()]
            if len(missing) <= self.blocks_free and tiers.worth_loading(missing, len(prefix) - len(kept)):
                return len(prefix)
            return min(len(kept), bound)

        length = agreed_length(longest, most, self._least)
        if length <= len(kept):
            return None
        prefix = search(length, tiers.find)
        tiers.touch([key for key, _, _ in prefix.elsewhere()])  # room is made for them at others' cost
        try:
            table, loads = self._allocator.adopt(prefix)
        except KvPoolExhausted:  # on all ranks alike
            return None
        if self._least(int(all(tiers.load(load.key, self._parts(load.destination)) for load in loads))):
            for load in loads:
                self._allocator.loaded(load)
            return table
        self._allocator.release(table)
        return None

    def _least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        if self._ranks == 1:
            return number
        least = torch.tensor(number)
        distributed.all_reduce(least, op=distributed.ReduceOp.MIN)
        return int(least)

    def _save(self, key: bytes, block: BlockId) -> None:
        if self._tiers is not None:
            self._tiers.save(key, self._parts(block))

    def _parts(self, block: BlockId) -> list[torch.Tensor]:
        """A block's content: views `[block_size, heads, dim]` of its keys in every slot, then of its values."""
        return [store[block] for store in (*self.keys, *self.values)]
