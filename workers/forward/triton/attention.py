"""Triton kernel for attention over a paged KV pool, for prompt chunks, single tokens, chains and trees alike.

Nothing is gathered and no mask is in memory. The queries of the heads that share a KV head form one tile. A query sees
the positions up to its last committed one, within its layer's window, and those whose bits are set in its word: the
nodes of its draft tree. The keys of a row are divided into splits of a fixed number of positions, so that neither the
batch nor the other rows nor a draft change a bit (split-KV with a reduction, after Dao's FlashDecoding). The program
that finishes the last split of a tile joins them, in their order.

The module needs the package `triton`; only `workers.forward.backends.triton` and the kernels over windows import it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.forward.triton.eight_bits import AS_IT_IS, StoredLayer, scaled, widened
from workers.forward.triton.tiles import (
    HOPPER,
    LEAST_ROWS,
    NO_QUERY,
    SPLIT_KEYS,
    Blocks,
    Queries,
    capability_of,
    padded_width,
    short_tile,
)

_KEY_NUMBERS, _MOST_KEYS = 8192, 64
"""Numbers of the keys of one iteration, and most keys: 64 of 128 numbers, 32 of 256. More would not fit registers."""
_MOST_REGISTERS = 128
"""Registers of a thread for narrow tiles. Four programs then run on a multiprocessor instead of two, and more loads are
in flight, as an H200 showed for 4 and 8 heads of 128 numbers; for others it is predicted. Nothing moves to memory:
the places of results are computed after the loop over the keys."""
_MOST_REGISTERS_WIDENING = 168
"""Most registers of a thread where keys and values have 8 bits: three programs fit beside each other."""
_MANY_HEADS, _KEYS_OF_MANY = 32, 32
"""Number of query heads of one KV head from which an iteration reads at most the second number of keys; before Hopper
half as many heads, a predicted choice. With more keys, registers of heads whose size is a power of two would spill."""
_EXACT_KEYS, _EXACT_WARPS = 16, 8
"""Keys of one iteration, and warps, where products are of float32. These are not computed on tensor cores, and their
operands are in registers: with 64 keys and 4 warps, up to 5.9 kB of a program's numbers would move to memory."""
_PROGRAMS, _LEAST_IN_TURN = 2048, 8
"""Programs of a launch beyond which one computes several splits of its row in turn, and how many share a row at least.
In a graph there are as many splits as the longest row may have, and launching those without keys would take longer than
computing the others."""
_WORD, _NO_QUERY = tl.constexpr(64), tl.constexpr(NO_QUERY)
_FURTHEST = tl.constexpr(1 << 30)
"""Beyond the positions of every key."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is compiled. No choice depends on the batch, so none changes the order of a sum."""

    keys: int
    """Keys of one iteration."""
    warps: int
    stages: int
    """Iterations whose keys and values are loaded ahead."""
    registers: int | None
    """Most registers of a thread. `None` is the compiler's choice."""


def launch_of(
    group: int,
    dim: int,
    *,
    is_wide: bool,
    capability: int,
    kind: int = AS_IT_IS,
    has_latents: bool = False,
    is_exact: bool = False,
) -> Launch:
    """The launch for `group` heads of `dim` numbers that share a KV head.

    `kind` is how keys and values are stored (`StoredLayer`): widening 8 bits takes registers. `is_exact`: queries are
    float32. `capability` is the device's, 90 for Hopper. Before it, products keep their operands in registers.
    """
    if is_exact:
        return Launch(_EXACT_KEYS, _EXACT_WARPS, 3, None)
    width: int = triton.next_power_of_2(dim)
    if has_latents:  # keys are loaded once, so twice as many fit
        return Launch(max(16, min(_MOST_KEYS, 2 * _KEY_NUMBERS // width)), 8, 3, None)
    # Padded heads take more registers: they have half as many keys.
    keys = max(16, min(_MOST_KEYS, _KEY_NUMBERS // width // (1 if dim == width else 2)))
    if is_wide:
        return Launch(keys if capability >= HOPPER else min(keys, 32), 4 if dim > 64 else 8, 3, None)
    warps = 8 if dim > 128 else 4
    if kind != AS_IT_IS:
        return Launch(max(16, keys // 2), warps, 3, _MOST_REGISTERS_WIDENING)
    if triton.next_power_of_2(group) >= (_MANY_HEADS if capability >= HOPPER else _MANY_HEADS // 2):
        keys = min(keys, _KEYS_OF_MANY)
    return Launch(keys, warps, 3, _MOST_REGISTERS)


def paged_attention(
    queries: torch.Tensor,
    stored: StoredLayer,
    plan: Queries,
    read: Blocks,
    output: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    sinks: int = 0,
    soft_cap: float | None = None,
    learned_sinks: torch.Tensor | None = None,
    latent_groups: int | None = None,
) -> None:
    """Write the attention of the plan's queries, of `queries` `[tokens, heads, dim]`, into `output` of that shape.

    With `latent_groups`, all heads share one key per token, whose first numbers are its value: `output` is `[tokens,
    heads, value dim]`. So many groups of heads are programs of their own.

    Tokens that are padding are not written. What a row stores up to its last token is finite, also where no query sees
    it. `window` 0 is none. `soft_cap` bounds the products by tanh (Gemma 2, section 2). `learned_sinks` `[heads]` are
    logits of a key without a value (gpt-oss).
    """
    keys, values = stored.keys, stored.values
    heads, dim = queries.shape[1], output.shape[2]
    kv_heads, size = keys.shape[2], keys.shape[1]
    more = 0 if latent_groups is None else queries.shape[2] - dim
    if latent_groups is not None:
        kv_heads = latent_groups
    group = heads // kv_heads
    width, group_tile = padded_width(dim), triton.next_power_of_2(group)
    tile = max(plan.tile, LEAST_ROWS // group_tile)
    tiles = len(plan.items) * kv_heads
    shape = (plan.splits, len(plan.tokens), heads)
    sums = torch.empty((1,) if plan.is_wide else (*shape, width), dtype=torch.float32, device=queries.device)
    stats = torch.empty((1,) if plan.is_wide else (2, *shape), dtype=torch.float32, device=queries.device)
    launch = launch_of(
        group,
        dim,
        is_wide=plan.is_wide,
        capability=capability_of(queries.device),
        kind=stored.kind,
        has_latents=latent_groups is not None,
        is_exact=queries.is_cuda and queries.dtype == torch.float32,  # interpreted, many small tiles take long
    )
    in_turn = 1 if plan.is_wide else min(plan.splits, max(_LEAST_IN_TURN, _PROGRAMS // max(1, tiles)))
    attend_tiles[(len(plan.items), kv_heads, in_turn)](
        queries, keys, values, output, sums, stats, plan.arrivals, stats if learned_sinks is None else learned_sinks,
        plan.items, plan.tokens, plan.last, plan.positions, plan.words, plan.starts,
        read.blocks, read.order, read.counts, stored.key_scales, stored.value_scales,
        scale, soft_cap or 0.0, window, sinks, len(plan.tokens), read.blocks.shape[1], plan.splits,
        queries.stride(0), queries.stride(1), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        output.stride(0), output.stride(1), stored.scale_slot,
        HEADS=heads, GROUP=group, GROUP_TILE=group_tile, TILE=tile,
        SHORT=tile if plan.is_wide else short_tile(group_tile, tile),
        WORDS=plan.words.shape[1], DIM=dim, WIDTH=width, IS_LATENT=latent_groups is not None, MORE=more,
        MORE_WIDTH=padded_width(max(1, more)), SIZE=size, KEY_TILE=launch.keys,
        SPLIT=SPLIT_KEYS, IS_SPLIT=not plan.is_wide,
        HAS_CAP=soft_cap is not None, HAS_SINKS=learned_sinks is not None, KIND=stored.kind,
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers,
        EXACT=queries.dtype == torch.float32 or not queries.is_cuda,  # the interpreter has no products of bfloat16
    )  # fmt: skip


# Sizes that change from step to step are not specialized on: they would be compiled while serving.
@triton.jit(do_not_specialize=["window", "sinks", "query_count", "most_blocks", "splits"])
def attend_tiles(
    queries, keys, values, output, sums, stats, arrivals, sink_logits,
    items, tokens, lasts, positions, words, starts, blocks, order, counts, key_scales, value_scales,
    scale, soft_cap, window, sinks, query_count, most_blocks, splits,
    query_token, query_head, key_slot, key_head, value_slot, value_head, output_token, output_head, scale_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr,
    WORDS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, KEY_TILE: tl.constexpr,
    SPLIT: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, EXACT: tl.constexpr,
    KIND: tl.constexpr, IS_LATENT: tl.constexpr, MORE: tl.constexpr, MORE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile of queries, one KV head and some splits of the keys. Up to `SHORT` queries have half as many products.

    A query has the same bits in both kinds of tile: the same instructions multiply its numbers, and the same threads
    add them in the same order, as the compiled code shows (`tests/gpu_proof/test_compiled.py`).
    """
    own = items + 3 * tl.program_id(0)
    is_short = False
    if SHORT < TILE:
        is_short = tl.load(own + 2) <= SHORT
    if is_short:
        attend_tile(
            queries, keys, values, output, sums, stats, arrivals, sink_logits, own, tokens, lasts, positions, words,
            starts, blocks, order, counts, key_scales, value_scales, scale, soft_cap, window, sinks, query_count,
            most_blocks, splits, query_token, query_head, key_slot, key_head, value_slot, value_head, output_token,
            output_head, scale_slot, HEADS, GROUP, GROUP_TILE, SHORT, True, WORDS, DIM, WIDTH, SIZE, KEY_TILE, SPLIT,
            IS_SPLIT, HAS_CAP, HAS_SINKS, EXACT, KIND, IS_LATENT, MORE, MORE_WIDTH,
        )  # fmt: skip
    else:
        attend_tile(
            queries, keys, values, output, sums, stats, arrivals, sink_logits, own, tokens, lasts, positions, words,
            starts, blocks, order, counts, key_scales, value_scales, scale, soft_cap, window, sinks, query_count,
            most_blocks, splits, query_token, query_head, key_slot, key_head, value_slot, value_head, output_token,
            output_head, scale_slot, HEADS, GROUP, GROUP_TILE, TILE, SHORT == TILE, WORDS, DIM, WIDTH, SIZE, KEY_TILE,
            SPLIT, IS_SPLIT, HAS_CAP, HAS_SINKS, EXACT, KIND, IS_LATENT, MORE, MORE_WIDTH,
        )  # fmt: skip


@triton.jit
def attend_tile(
    queries, keys, values, output, sums, stats, arrivals, sink_logits,
    own, tokens, lasts, positions, words, starts, blocks, order, counts, key_scales, value_scales,
    scale, soft_cap, window, sinks, query_count, most_blocks, splits,
    query_token, query_head, key_slot, key_head, value_slot, value_head, output_token, output_head, scale_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, TILE: tl.constexpr, HOLDS_WORDS: tl.constexpr,
    WORDS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, KEY_TILE: tl.constexpr,
    SPLIT: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, EXACT: tl.constexpr,
    KIND: tl.constexpr, IS_LATENT: tl.constexpr, MORE: tl.constexpr, MORE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile of up to `TILE` queries: an online softmax over the row's blocks in each split."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    row, query, is_query, head = queries_of_tile(own, kv_head, GROUP, GROUP_TILE, TILE)
    token = tl.load(tokens + query, mask=is_query, other=0).to(tl.int64)
    last = tl.load(lasts + query, mask=is_query, other=_NO_QUERY)
    before = tl.load(positions + query, mask=is_query, other=0) - tl.where(window > 0, window, _FURTHEST)
    start = tl.load(starts + row)
    dims = tl.arange(0, WIDTH)
    query_row = token * query_token + head * query_head
    query_tile = load_rows(queries, query_row, dims, is_query[:, None] & (dims < DIM)[None, :])
    others = tl.arange(0, MORE_WIDTH)  # what keys have beside the numbers of their values
    other_tile = load_rows(queries + DIM, query_row, others, is_query[:, None] & (others < MORE)[None, :])
    stored_head = 0 if IS_LATENT else kv_head
    first_word = tl.load(words + query * WORDS, mask=is_query & (WORDS > 0), other=0)[:, None]
    # A tile ends at the last position that one of its queries sees: what is stored behind may be anything.
    end = 1 + tl.max(tl.maximum(last, last_node(words, query, is_query, start, WORDS)), axis=0)
    # Tiles of keys and splits without a key are passed over, but all begin at the same positions in every step.
    left_out = blocks_left_out(counts + row, order + row * most_blocks)
    gap = (sinks + SIZE - 1) // SIZE * SIZE
    gap_end = gap + left_out * SIZE
    tiles_before, tiles_out = left_out_between(gap, gap_end, KEY_TILE)
    splits_before, splits_out = left_out_between(gap, gap_end, SPLIT)
    split_count = without_gap((end + SPLIT - 1) // SPLIT, splits_before, splits_out) if IS_SPLIT else 1
    span = query_count.to(tl.int64) * HEADS
    for number in range(tl.program_id(2), split_count, tl.num_programs(2)):
        begin = with_gap(number, splits_before, splits_out) * SPLIT if IS_SPLIT else 0
        split_end = tl.minimum(end, begin + SPLIT) if IS_SPLIT else end
        most = tl.where(is_query, float("-inf"), float("-inf"))
        total = tl.zeros([TILE * GROUP_TILE], tl.float32)
        result = tl.zeros([TILE * GROUP_TILE, WIDTH], tl.float32)
        first_tile = without_gap(begin // KEY_TILE, tiles_before, tiles_out)
        end_tile = without_gap((split_end + KEY_TILE - 1) // KEY_TILE, tiles_before, tiles_out)
        for tile in range(first_tile, end_tile):
            first_key = with_gap(tile, tiles_before, tiles_out) * KEY_TILE
            key = first_key + tl.arange(0, KEY_TILE)
            is_read = (key < split_end) & ((key < gap) | (key >= gap_end))
            block = row * most_blocks + key // SIZE - tl.where(key < gap, 0, left_out)
            slot = (tl.load(blocks + block, mask=is_read, other=0) * SIZE + key % SIZE).to(tl.int64)
            is_loaded = is_read[:, None] & (dims < DIM)[None, :]
            key_tile = load_rows(keys + stored_head * key_head, slot * key_slot, dims, is_loaded)
            products = product(query_tile, tl.trans(widened(key_tile, KIND, query_tile.dtype)), EXACT)
            if MORE > 0:
                products += other_products(other_tile, keys + DIM, slot * key_slot, others, is_read, MORE, KIND, EXACT)
            products = scaled(products * scale, key_scales + stored_head, slot * scale_slot, is_read, KIND)
            if HAS_CAP:
                products = soft_cap * tanh(products / soft_cap)
            word = words_of(words, query, is_query, key, start, WORDS) if WORDS > 1 else first_word
            if WORDS == 1 and not HOLDS_WORDS:
                word = late_word(words, query, is_query, first_key + KEY_TILE, start)
            sees = sees_keys(word, last, before, key, is_read, start, sinks, WORDS)
            weights, shrink, most = weighed(tl.where(sees, products, float("-inf")), most)
            total = total * shrink + tl.sum(weights, axis=1)
            value_tile = key_tile
            if not IS_LATENT:
                value_tile = load_rows(values + kv_head * value_head, slot * value_slot, dims, is_loaded)
            weights = scaled(weights, value_scales + stored_head, slot * scale_slot, is_read, KIND)
            result = result * shrink[:, None] + product(weights, widened(value_tile, KIND, query_tile.dtype), EXACT)
        # What was read of the queries is read again from here on: no register holds it, or a place, during the loop.
        if split_count == 1:
            store_finished(most, total, result, output, sink_logits, own, tokens, kv_head, output_token, output_head,
                           GROUP, GROUP_TILE, TILE, DIM, WIDTH, HAS_SINKS)  # fmt: skip
        else:
            store_part(most, total, result, sums, stats, number, splits, span, own, kv_head,
                       HEADS, GROUP, GROUP_TILE, TILE, WIDTH)  # fmt: skip
    if IS_SPLIT:  # noqa: SIM102 - decided by the compiler
        if is_last_program(arrivals + item * tl.num_programs(1) + kv_head, split_count):
            entry, is_entry = entries_of_tile(own, kv_head, HEADS, GROUP, GROUP_TILE, TILE)
            most, total, result = joined(sums, stats, entry, is_entry, dims, split_count, splits, span, WIDTH)
            store_finished(most, total, result, output, sink_logits, own, tokens, kv_head, output_token, output_head,
                           GROUP, GROUP_TILE, TILE, DIM, WIDTH, HAS_SINKS)  # fmt: skip


@triton.jit
def queries_of_tile(item, kv_head, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, TILE: tl.constexpr):
    """The row of a tile, and for each row of its products the query, whether there is one, and the head or 0."""
    first, count = tl.load(item + 1), tl.load(item + 2)
    index = tl.arange(0, TILE * GROUP_TILE)
    is_query = (index // GROUP_TILE < count) & (index % GROUP_TILE < GROUP)
    head = tl.where(is_query, kv_head * GROUP + index % GROUP_TILE, 0)  # else its places would be held in registers
    return tl.load(item), first + index // GROUP_TILE, is_query, head


@triton.jit
def entries_of_tile(
    item, kv_head, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, TILE: tl.constexpr
):
    """For each row of a tile's products its place among all queries and heads, and whether there is a query."""
    _, query, is_query, head = queries_of_tile(item, kv_head, GROUP, GROUP_TILE, TILE)
    return query * HEADS + head, is_query


@triton.jit
def last_node(words, query, is_query, start, WORDS: tl.constexpr):
    """The position of the last node that each query sees, and -1 where it sees none."""
    bits = tl.arange(0, _WORD)
    last = tl.where(is_query, -1, -1)
    for number in tl.static_range(WORDS):
        word = tl.load(words + query * WORDS + number, mask=is_query, other=0)
        is_set = (word[:, None] >> bits[None, :].to(tl.int64)) & 1 != 0
        last = tl.maximum(last, tl.max(tl.where(is_set, start + number * _WORD + bits[None, :], -1), axis=1))
    return last


@triton.jit
def blocks_left_out(count, order):
    """Blocks that a row does not read, between those of the sinks and those of its window."""
    last = tl.maximum(tl.load(count), 1) - 1
    return tl.load(order + last) - last


@triton.jit
def left_out_between(gap, gap_end, UNIT: tl.constexpr):
    """Units of so many positions that begin before `gap`, and how many whole ones lie between it and `gap_end`."""
    before = (gap + UNIT - 1) // UNIT
    return before, tl.maximum(gap_end // UNIT - before, 0)


@triton.jit
def without_gap(number, before, left_out):
    """The number of a unit among those that are not left out."""
    return number - tl.minimum(tl.maximum(number - before, 0), left_out)


@triton.jit
def with_gap(number, before, left_out):
    """The number among all units of a unit that is not left out."""
    return tl.where(number < before, number, number + left_out)


@triton.jit
def load_rows(stored, rows, dims, is_loaded):
    """The numbers at `dims` of each row, 0 where they are not loaded."""
    return tl.load(stored + rows[:, None] + dims[None, :], mask=is_loaded, other=0)


@triton.jit
def other_products(
    other_tile, keys, rows, others, is_read, MORE: tl.constexpr, KIND: tl.constexpr, EXACT: tl.constexpr
):
    """The products with what keys have beside the numbers of their values."""
    key_tile = load_rows(keys, rows, others, is_read[:, None] & (others < MORE)[None, :])
    return product(other_tile, tl.trans(widened(key_tile, KIND, other_tile.dtype)), EXACT)


@triton.jit
def tanh(value):
    """The hyperbolic tangent."""
    return 1.0 - 2.0 / (tl.exp(2.0 * value) + 1.0)


@triton.jit
def late_word(words, query, is_query, key_end, start):
    """The only word of each query, loaded where a key may have a bit in it: held before, it would take registers."""
    return tl.load(words + query, mask=tl.where(is_query, key_end, 0) > start, other=0)[:, None]


@triton.jit
def words_of(words, query, is_query, key, start, WORDS: tl.constexpr):
    """For each query and key, the query's word that has the key's bit."""
    number = (key[None, :] - start) // _WORD
    is_in_words = (key[None, :] >= start) & (number < WORDS) & is_query[:, None]
    return tl.load(words + query[:, None] * WORDS + number, mask=is_in_words, other=0)


@triton.jit
def sees_keys(word, last, before, key, is_read, start, sinks, WORDS: tl.constexpr):
    """Whether each query sees each key that is read: those its words name, and up to its last one those of its window,
    which begins behind `before`, and the sinks.

    `word` is the only one of each query, or that of each query and key.
    """
    upper, lower = tl.where(is_read, key, _FURTHEST), tl.where(key < sinks, _FURTHEST, key)
    sees = (upper[None, :] <= last[:, None]) & (lower[None, :] > before[:, None])
    if WORDS > 0:
        bit = key - start
        lowest = tl.where(is_read & (bit >= 0) & (bit < _WORD * WORDS), 1, 0)
        sees = sees | ((word >> (bit[None, :] & (_WORD - 1)).to(tl.int64)).to(tl.int32) & lowest[None, :] != 0)
    return sees


@triton.jit
def product(left, right, EXACT: tl.constexpr):
    """The product of two tiles in float32: of float32 where it is to be exact, else of the right tile's type."""
    if EXACT:
        result = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(left.to(right.dtype), right)
    return result


@triton.jit
def weighed(scores, most):
    """An online softmax's weights of new scores, the factor of the sums before, and the highest score so far."""
    highest = tl.maximum(most, tl.max(scores, axis=1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    return tl.exp(scores - base[:, None]), tl.exp(most - base), highest


@triton.jit
def finished(most, total, result, sink_logits, head, is_query, HAS_SINKS: tl.constexpr):
    """The sum of values divided by the sum of weights, to which a learned sink adds its own."""
    if HAS_SINKS:
        sink = tl.load(sink_logits + head, mask=is_query, other=0.0).to(tl.float32)
        highest = tl.maximum(most, sink)
        shrink = tl.exp(most - highest)
        total = total * shrink + tl.exp(sink - highest)
        result = result * shrink[:, None]
    return result / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def store_finished(
    most, total, result, output, sink_logits, item, tokens, kv_head, output_token, output_head, GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Store the attention of a tile's queries."""
    _, query, is_query, head = queries_of_tile(item, kv_head, GROUP, GROUP_TILE, TILE)
    token = tl.load(tokens + query, mask=is_query, other=0).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    place = output + token[:, None] * output_token + head[:, None] * output_head + dims[None, :]
    result = finished(most, total, result, sink_logits, head, is_query, HAS_SINKS)
    tl.store(place, result.to(output.dtype.element_ty), mask=is_query[:, None] & (dims < DIM)[None, :])


@triton.jit
def store_part(
    most, total, result, sums, stats, number, splits, span, item, kv_head, HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store what one split adds to the attention of a tile's queries."""
    entry, is_entry = entries_of_tile(item, kv_head, HEADS, GROUP, GROUP_TILE, TILE)
    at = number * span + entry
    tl.store(sums + at[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], result, mask=is_entry[:, None])
    tl.store(stats + at, most, mask=is_entry)
    tl.store(stats + splits * span + at, total, mask=is_entry)


@triton.jit
def is_last_program(arrived, split_count):
    """Whether this is the last of the programs that share a tile of several splits. It then sees what all have stored.

    It sets the counter back to 0.
    """
    is_last = False
    if (split_count > 1) & (tl.program_id(2) < split_count):
        tl.debug_barrier()  # all threads have stored their part
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
        is_last = before == tl.minimum(split_count, tl.num_programs(2)) - 1
        if is_last:
            tl.store(arrived, 0)
        tl.debug_barrier()  # no thread loads what other programs have stored before the counter was read
    return is_last


@triton.jit
def joined(sums, stats, entry, is_query, dims, split_count, splits, span, WIDTH: tl.constexpr):
    """The softmax over the splits of a tile: the highest score, the sum of weights and the sum of values of each query.

    The splits are added one by one: the order of a sum over a tile of splits would depend on the step's longest row.
    """
    most = tl.where(is_query, float("-inf"), float("-inf"))
    for number in range(split_count):
        place = stats + number * span + entry
        most = tl.maximum(most, tl.load(place, mask=is_query, other=float("-inf"), cache_modifier=".cg"))
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.where(is_query, 0.0, 0.0)
    result = tl.zeros([entry.shape[0], WIDTH], tl.float32)
    for number in range(split_count):
        at = number * span + entry
        weight = tl.exp(tl.load(stats + at, mask=is_query, other=float("-inf"), cache_modifier=".cg") - base)
        added = tl.load(stats + splits * span + at, mask=is_query, other=0.0, cache_modifier=".cg")
        values = tl.load(
            sums + at[:, None] * WIDTH + dims[None, :], mask=is_query[:, None], other=0.0, cache_modifier=".cg"
        )
        total += added * weight
        result += values * weight[:, None]
    return most, total, result
