"""The paged KV pool: the keys and values of every layer, in blocks that `BlockAllocator` manages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod

import torch

from cluster.core.config.model_section import PoolSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError, KvPoolExhausted
from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.tree import ROOT
from workers.kv.allocator import BlockAllocator, BlockCopy
from workers.kv.block_table import BlockTable, Prefix
from workers.kv.copies import CopyKernels, Path, StackCopies, follow
from workers.kv.eight_bits import record_bytes
from workers.kv.groups import KvCacheGroups, group_layers
from workers.kv.huge_pages import huge_pages
from workers.kv.pool_size import (
    block_bytes,
    blocks_that_fit,
    kept_prefix_states,
    kept_sequences,
    largest_step,
    memory_setting,
    stored_type,
)
from workers.kv.spec import KvCacheSpec
from workers.kv.states import STATES_PER_SEQUENCE, SequenceStates, StateStore
from workers.kv.store import KvStore
from workers.kv.tiers import Tiers, agreed_length
from workers.ranks import least_of_all_ranks

RECURRENT_DRAFT = (
    "draft.model.path: a model with recurrent layers is refused, since a draft is cut to shorter lengths and "
    "its earlier states are gone; it must have attention alone"
)
"""Why a draft model with recurrent layers is refused."""

_Search = Callable[[int, Callable[[bytes], bool] | None], Prefix]
"""(max tokens, is_offloaded) → the longest stored prefix; see `BlockAllocator.find`."""


def _make_states(spec: KvCacheSpec, section: PoolSection, *, truncatable: bool) -> StateStore | None:
    """Room for the states of recurrent layers. Raises `ConfigurationError` for what such a model cannot have."""
    if not spec.states:
        return None
    if truncatable:
        raise ConfigurationError(RECURRENT_DRAFT)
    if isinstance(section, KvSection) and (section.host_bytes or section.disk_directory):
        raise ConfigurationError(
            "target.kv.host_bytes and target.kv.disk_directory are refused for a model with recurrent layers, whose "
            "states are not stored with its blocks; they must be unset"
        )
    return StateStore(
        spec.states, spec.device, STATES_PER_SEQUENCE * kept_sequences(section), prefixes=kept_prefix_states(section)
    )


def _allocate_tensors(
    spec: KvCacheSpec, kv_groups: KvCacheGroups, blocks: int, stored: torch.dtype | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Allocate the keys and values of each block layer, `[blocks, block_size, heads, dim]`, or records in 8 bits.

    The third list holds the stacks `[2 * layers, blocks, …]` that they are views of, one per shape. Copying blocks
    inside a stack takes one operation, whatever the number of layers. Where keys hold their values, the stack has the
    keys alone, and the values are empty.
    """
    layers_of: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for layer, shape in enumerate(kv_groups.block_layers):
        width: tuple[int, ...] = (shape.kv_heads, shape.head_dim) if stored is None else (record_bytes(shape),)
        layers_of.setdefault((width, shape.records), []).append(layer)
    keys, values = ([torch.empty(0)] * len(kv_groups.block_layers) for _ in range(2))
    stacks: list[torch.Tensor] = []
    for (width, records), layers in layers_of.items():
        # Zeros: a masked position is multiplied by zero, and zero times NaN would be NaN.
        size = (records * len(layers), blocks, kv_groups.layout.block_size, *width)
        stacks.append(_zeros(size, spec.dtype if stored is None else torch.uint8, spec.device))
        for index, layer in enumerate(layers):
            keys[layer] = stacks[-1][records * index]
            values[layer] = stacks[-1][2 * index + 1] if records == 2 else keys[layer].new_empty(0)
    return keys, values, stacks


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or not prod(size):
        return torch.zeros(size, dtype=dtype, device=device)
    return huge_pages(prod(size) * dtype.itemsize).view(dtype).view(size)


class KvPool:
    """Keys and values of all sequences on this rank; `keys[block_layer]` is `[blocks, block_size, heads, dim]`, or
    records in 8 bits (`KvStore`).

    `kv_groups.placements[layer]` holds the layer's block table and block layer. Under tensor parallelism the heads
    are this rank's own, and `blocks` must be the same on every rank. Evicted blocks move to the host and disk tiers
    if the section configures any; `close` frees these. A `truncatable` pool can cut sequences to any length; it has
    no prefix cache.
    """

    def __init__(
        self,
        spec: KvCacheSpec,
        section: PoolSection,
        blocks: int | None = None,
        *,
        truncatable: bool = False,
        kernels: CopyKernels | None = None,
    ) -> None:
        """`kernels` copy blocks and slots in place of those of a GPU."""
        self.kv_groups = group_layers(spec, section, truncatable)
        blocks_total = blocks_that_fit(spec, section, truncatable) if blocks is None else blocks
        self.states = _make_states(spec, section, truncatable=truncatable)
        """The states of recurrent layers; `None` without any. With them, a sequence begins behind cached blocks only
        where a state was kept."""
        caching = section if isinstance(section, KvSection) and section.prefix_cache and not truncatable else None
        has_state = None if self.states is None else self.states.prefixes.__contains__
        self._allocator = BlockAllocator(
            blocks_total, self.kv_groups.layout, caching is not None, self._save, has_state
        )
        self.largest_step = largest_step(section)
        """Tokens of the step for whose activations a GPU has memory beside this pool; 0 if its section names none."""
        self.memory_setting = memory_setting(spec, section)
        """The key of the setting that says how much memory this pool takes, and its value."""
        self._device = spec.device
        self._ranks = spec.tensor_parallel
        self._moves: list[Path] | None = None
        """What is noted inside `moving_together`."""
        self._copies: list[BlockCopy] | None = None
        """What is noted inside `reserving_together`."""

        stored = stored_type(section)
        self.keys, self.values, stacks = _allocate_tensors(
            spec, self.kv_groups, blocks_total + spec.scratch_blocks, stored
        )
        self._stacks = StackCopies(stacks, spec.device, kernels)
        self.store = KvStore(self.kv_groups, self.keys, self.values, stored)
        self.tiers: Tiers | None = None  # last: if anything above raises, there is nothing to close
        """The host and disk tiers, or `None` if none is configured."""
        if caching is not None and (caching.host_bytes or caching.disk_directory):
            self.tiers = Tiers(caching, block_bytes(self.kv_groups, spec.dtype, stored), spec.device)
            self.tiers.start()

    def close(self) -> None:
        """Free the tiers. Closing again does nothing."""
        if self.tiers is not None:
            self.tiers.close()

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._allocator.block_size

    @property
    def layout(self) -> KvLayout:
        """The number of blocks that a sequence takes, by group."""
        return self._allocator.layout

    @property
    def is_lossless(self) -> bool:
        """True unless keys and values have 8 bits, or a configured window hides positions that the model would see."""
        return self.kv_groups.is_lossless and self.store.stored is None

    @property
    def blocks_total(self) -> int:
        """Blocks in the pool."""
        return self._allocator.blocks_total

    @property
    def scratch(self) -> BlockId:
        """The block after the last: CUDA graphs write their padding into it, and no sequence holds it."""
        return BlockId(self.blocks_total)

    @property
    def blocks_free(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return self._allocator.blocks_free

    def occupancy(self) -> KvOccupancy:
        """Total and free blocks, as reported to the coordinator."""
        return KvOccupancy(self.blocks_total, self.blocks_free)

    def new_table(self, salt: str = "") -> BlockTable:
        """An empty block table for a new sequence."""
        return self._allocator.new_table(salt)

    def open(self, tokens: Sequence[int], salt: str = "", parent: BlockTable | None = None) -> BlockTable:
        """A block table for a new sequence that begins with `tokens`, with the longest stored prefix of them.

        The last token is never part of the prefix, since its logits must be computed. Blocks are shared with the
        parent and the prefix cache. Offloaded blocks are loaded if they fit and if loading is faster than computing.
        """
        if self.states is not None:
            return self._open_with_states(self.states, tokens, salt, parent)
        max_tokens = len(tokens) - 1
        chain: list[bytes] = []

        def search(max_tokens: int, is_offloaded: Callable[[bytes], bool] | None = None) -> Prefix:
            return self._allocator.find(tokens, salt, parent, max_tokens, is_offloaded, chain)

        kept = search(max_tokens)
        if self.tiers is not None and len(kept) < max_tokens:
            longer = self._open_with_tiers(self.tiers, search, max_tokens, kept)
            if longer is not None:
                return longer
            kept = search(max_tokens)  # making room for blocks that were not loaded may have evicted others
        return self._allocator.adopt(kept)[0]

    def _open_with_states(
        self, states: StateStore, tokens: Sequence[int], salt: str, parent: BlockTable | None
    ) -> BlockTable:
        """A table that begins where a state is: the parent's, if it has all of the parent's tokens, or a kept one.

        If more blocks than that are stored, another sequence has had the same tokens: the state after them is kept.
        """
        table = self.new_table(salt)
        if states.free < 1:
            return table
        is_longer = parent is not None and 0 < parent.stored_len < len(tokens) and parent.root == table.root
        if parent is not None and is_longer and list(tokens[: parent.stored_len]) == parent.tokens:
            table = self._allocator.fork(parent, parent.stored_len)
            states.share(parent.states, table.states)
            return table
        prefix = self._allocator.find(tokens, salt, max_tokens=len(tokens) - 1)
        if len(prefix):
            table = self._allocator.adopt(prefix)[0]
            states.begin(table.states, prefix.chain[-1])
        if prefix.covered > len(prefix):
            table.states.marks.add(prefix.covered)
        return table

    def mark_prompt(self, table: BlockTable, prompt_len: int) -> None:
        """Let recurrent layers keep their state after the last full block that a repeated prompt can begin behind."""
        if end := max(0, prompt_len - 1) // self.block_size * self.block_size:
            table.states.marks.add(end)

    def keep_states(self, table: BlockTable, tokens: int) -> Mapping[int, int]:
        """The slots where the step puts the states after block ends inside the row's next `tokens` tokens.

        By the number of tokens of the row before it. They are kept for later sequences.
        """
        if self.states is None or not self.states.prefixes.capacity:
            return {}
        begin = table.stored_len
        wanted = self._wanted_ends(table.states, begin, begin + tokens)
        kept = self.states.keep(table.states, [length for length in wanted if length < begin + tokens])
        return {length - begin: state for length, state in kept.items()}

    def _wanted_ends(self, states: SequenceStates, begin: int, end: int) -> list[int]:
        """The lengths in `(begin, end]` whose states are kept: marks, or the last block end beyond all of them."""
        latest = end // self.block_size * self.block_size
        wanted = {length for length in states.marks if begin < length <= end}
        if latest > max({begin, *states.marks}):
            wanted.add(latest)
        return sorted(wanted)

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """A new table that begins with the first `length` stored tokens of `table`. Allocates no block.

        Raises `ValueError` if a window has already freed blocks that so short a sequence sees, and for a model with
        recurrent layers, whose earlier states are gone.
        """
        if self.states is not None:
            raise ValueError("a table of a model with recurrent layers cannot be cut")
        return self._allocator.fork(table, length)

    def reserve(self, table: BlockTable, length: int, nodes: int = 0) -> None:
        """Make positions up to `length - 1` available, and those from `table.stored_len` on writable.

        For recurrent layers it takes room for a step's states, those after each of the `nodes` of its tree included.
        Raises `KvPoolExhausted` and changes nothing if the pool has too few free blocks or states.
        """
        if self.states is not None:
            self.states.claim(table.states, 1 + nodes)
        try:
            copies = self._allocator.reserve(table, length)
        except KvPoolExhausted:
            if self.states is not None:
                self.states.drop(table.states)
            raise
        if not copies:
            return
        if self._copies is None:
            self._stacks.copy_blocks(copies)
            return
        if follow(copies, self._copies):
            self._copy_noted()
        self._copies += copies

    @contextmanager
    def reserving_together(self) -> Iterator[None]:
        """Inside, blocks that `reserve` has to copy are noted alone, and copied at the end: for all tables at once.

        What is loaded from the tiers meanwhile is loaded after them. Nothing else may write keys and values inside.
        """
        self._copies = []
        try:
            yield
        finally:
            self._copy_noted()
            self._copies = None

    def _copy_noted(self) -> None:
        if self._copies:
            self._stacks.copy_blocks(self._copies)
            self._copies.clear()

    def commit(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Record that the next positions hold `tokens`, and free the blocks beyond them."""
        self._allocator.commit(table, tokens)

    def commit_states(self, table: BlockTable, tokens: Sequence[int], nodes: Sequence[int]) -> None:
        """Commit as `commit` does, with the state of recurrent layers after the last of `tokens`.

        They are those of the step's row and of the accepted path `nodes` of its tree. States at block ends among them
        enter the prefix cache. Raises `ValueError` if no step computed them.
        """
        if self.states is None:
            raise ValueError("a model without recurrent layers has no states to commit")
        states, begin, fresh = table.states, table.stored_len, len(tokens) - len(nodes)
        after = {begin + fresh + depth: node + 1 for depth, node in enumerate((ROOT, *nodes))}
        found = dict(states.kept)
        found |= {length: states.fresh[index] for length, index in after.items() if index < len(states.fresh)}
        ends = self._wanted_ends(states, begin, begin + len(tokens)) if self.states.prefixes.capacity else []
        slots = self.states.slots
        kept = {length: slots.hold(found[length]) for length in ends if length in found}
        try:
            self.states.commit(states, nodes[-1] if nodes else ROOT)
            self._allocator.commit(table, tokens)
            for length, slot in kept.items():
                self._put_state(table, length, slot)
        finally:
            for slot in kept.values():
                slots.let_go(slot)

    def _put_state(self, table: BlockTable, length: int, slot: int) -> None:
        """Keep the state after a full block of the table. Beyond all marks, it takes the place of the one before."""
        if self.states is None:
            return
        key, prefixes = table.chain[length // self.block_size - 1], self.states.prefixes
        if length > max(table.states.marks, default=0):
            prefixes.forget(table.states.latest)
            table.states.latest = key
        prefixes.put(key, slot)

    def truncate(self, table: BlockTable, length: int) -> None:
        """Free what lies beyond `length` tokens. Only a truncatable pool can go below `table.stored_len`."""
        if self.states is not None:
            self.states.drop(table.states)
        self._allocator.truncate(table, length)

    def release(self, table: BlockTable) -> None:
        """Free all blocks and states of the table."""
        if self.states is not None:
            self.states.release(table.states)
        self._allocator.release(table)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `keys`, `values` `[tokens, heads, dim]` at `slots` `[tokens]` of the layer's table.

        NaN and infinities are replaced by finite numbers: the next sequence that gets the block may read it, masked.
        """
        self.store.write(layer, slots, keys, values)

    def move(self, table: BlockTable, start: int, nodes: Sequence[int]) -> None:
        """Copy positions `start + nodes[0], start + nodes[1], …` to `start, start + 1, …` in every layer.

        `nodes` ascend. All sources are read before any destination is written. Inside `moving_together` this is done
        at its end.
        """
        size = self.block_size
        sources = [start + node for node in nodes]
        destinations = range(start, start + len(nodes))
        paths = [Path(_slots(blocks, sources, size), _slots(blocks, destinations, size)) for blocks in table.blocks]
        if self._moves is None:
            self._stacks.copy_paths(paths)
        else:
            self._moves += paths

    @contextmanager
    def moving_together(self) -> Iterator[None]:
        """Inside, what is moved is noted alone, and copied at the end: for all tables at once.

        Nothing else may read or write keys and values inside.
        """
        noted: list[Path] = []
        self._moves = noted
        try:
            yield
        finally:
            self._moves = None
            if noted:
                self._stacks.copy_paths(noted)

    def warm_up(self) -> None:
        """Let a GPU's kernels be compiled before the first step."""
        self._stacks.warm_up()

    def _open_with_tiers(self, tiers: Tiers, search: _Search, max_tokens: int, kept: Prefix) -> BlockTable | None:
        """Load offloaded blocks. Returns `None` if that gains nothing over `kept`, or if loading fails."""
        self._copy_noted()
        prefix = kept

        def longest(bound: int) -> int:
            nonlocal prefix
            prefix = search(bound, tiers.find)
            missing = [key for key, _, _ in prefix.offloaded()]
            if len(missing) <= self.blocks_free and tiers.worth_loading(missing, len(prefix) - len(kept)):
                return len(prefix)
            return min(len(kept), bound)

        length = agreed_length(longest, max_tokens, partial(least_of_all_ranks, ranks=self._ranks))
        if length <= len(kept):
            return None
        # The ranks agreed on this prefix. Another search may find less: a disk drops blocks at any time.
        tiers.touch([key for key, _, _ in prefix.offloaded()])  # making room for them must not evict them
        try:
            table, loads = self._allocator.adopt(prefix)
        except KvPoolExhausted:  # every rank takes this branch, since all hold the same tables
            return None
        loaded = all(tiers.load(load.key, self._parts(load.destination)) for load in loads)
        if least_of_all_ranks(int(loaded), self._ranks):
            for load in loads:
                self._allocator.loaded(load)
            return table
        self._allocator.release(table)
        return None

    def _save(self, key: bytes, block: BlockId) -> None:
        if self.tiers is not None:
            self.tiers.save(key, self._parts(block))

    def _parts(self, block: BlockId) -> list[torch.Tensor]:
        """A block's content: views of its keys in every block layer, then of its values, where they have their own."""
        return [store[block] for store in (*self.keys, *self.values) if len(store)]


def _slots(blocks: Sequence[BlockId], positions: Iterable[int], size: int) -> list[int]:
    """The slots of positions in the blocks of one table."""
    return [blocks[position // size] * size + position % size for position in positions]
