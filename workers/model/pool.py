"""The paged KV pool: every layer's keys and values, in blocks that `BlockAllocator` hands out."""

from __future__ import annotations

import psutil
import torch

from cluster.core.config import KvSection
from cluster.core.errors import ConfigurationError
from cluster.core.kv import KvLayout
from cluster.core.types import KvOccupancy
from workers.model.blocks import BlockAllocator, BlockTable
from workers.model.loaded import LoadedModel

_MOST_BLOCKS = 1 << 22


def blocks_that_fit(model: LoadedModel, section: KvSection) -> int:
    """How many blocks the configured bytes, or the fraction of free memory, hold on this rank.

    Raises `ConfigurationError` when not even one fits.
    """
    budget = section.pool_bytes
    if budget is None:
        budget = int(_free_bytes(model.device) * section.memory_fraction)
    block_bytes = bytes_per_token(model) * section.block_size
    blocks = min(budget // block_bytes, _MOST_BLOCKS)
    if blocks < 1:
        raise ConfigurationError(
            f"kv.pool_bytes: a block of {section.block_size} tokens takes {block_bytes} bytes and {budget} are given"
        )
    return int(blocks)


def bytes_per_token(model: LoadedModel) -> int:
    """Bytes of keys and values that one token takes on this rank, over all layers."""
    elements = sum(2 * shape.kv_heads * shape.head_dim for shape in model.layers)
    return elements * model.dtype.itemsize


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


class KvPool:
    """Keys and values of all sequences on this rank; `keys[layer]` is `[blocks, block_size, heads, dim]`.

    Under tensor parallelism the heads are this rank's own, and `blocks` must be the same on every rank.
    """

    def __init__(self, model: LoadedModel, section: KvSection, blocks: int | None = None) -> None:
        blocks_total = blocks_that_fit(model, section) if blocks is None else blocks
        self._allocator = BlockAllocator(blocks_total, section.block_size)
        # Zeros, not garbage: a masked position is multiplied by zero, and zero times NaN is NaN.
        self.keys, self.values = (
            [
                torch.zeros(
                    (blocks_total, section.block_size, shape.kv_heads, shape.head_dim),
                    dtype=model.dtype,
                    device=model.device,
                )
                for shape in model.layers
            ]
            for _ in range(2)
        )

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._allocator.block_size

    @property
    def layout(self) -> KvLayout:
        """How sequences take blocks."""
        return KvLayout(self.block_size)

    @property
    def blocks_total(self) -> int:
        """Blocks in the pool."""
        return self._allocator.blocks_total

    @property
    def blocks_free(self) -> int:
        """Blocks that no sequence holds."""
        return self._allocator.blocks_free

    def occupancy(self) -> KvOccupancy:
        """The pool as the coordinator hears of it."""
        return KvOccupancy(self.blocks_total, self.blocks_free)

    def new_table(self) -> BlockTable:
        """An empty sequence."""
        return BlockTable()

    def reserve(self, table: BlockTable, length: int) -> None:
        """Make room for `length` tokens and own the part beyond `table.stored_len`.

        Raises `KvPoolExhausted`, having changed nothing.
        """
        for copy in self._allocator.reserve(table, length):
            for layer in (*self.keys, *self.values):
                layer[copy.destination] = layer[copy.source]

    def truncate(self, table: BlockTable, length: int) -> None:
        """Free what lies beyond `length` tokens."""
        self._allocator.truncate(table, length)

    def fork(self, table: BlockTable) -> BlockTable:
        """Share the stored tokens copy-on-write."""
        return self._allocator.fork(table)

    def release(self, table: BlockTable) -> None:
        """Free everything the table holds."""
        self._allocator.release(table)

    def slots(self, table: BlockTable, start: int, end: int) -> list[int]:
        """Flat indices (block * block_size + offset) of positions `start … end - 1`."""
        size = self.block_size
        return [table.blocks[position // size] * size + position % size for position in range(start, end)]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `keys`, `values` `[tokens, heads, dim]` at `slots` `[tokens]`.

        What is no number is stored as one: a freed block may be read, masked, by the next sequence that gets it.
        """
        for store, fresh in ((self.keys[layer], keys), (self.values[layer], values)):
            store.view(-1, *store.shape[2:]).index_copy_(0, slots, fresh.nan_to_num())

    def move(self, sources: list[int], destinations: list[int]) -> None:
        """Copy slots to slots in every layer; all sources are read before any is written."""
        if sources == destinations:
            return
        source, destination = (torch.tensor(slots, device=self.keys[0].device) for slots in (sources, destinations))
        for store in (*self.keys, *self.values):
            flat = store.view(-1, *store.shape[2:])
            flat[destination] = flat[source]
