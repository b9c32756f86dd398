"""Triton kernels for attention over a paged KV pool, for prompt chunks, single tokens, chains and trees alike.

Nothing is gathered and no mask is in memory. The queries of the heads that share a KV head form one tile. A query sees
the positions up to its last committed one, within its layer's window, and those whose bits are set in its word: the
nodes of its draft tree. The keys of a row are divided into splits of a fixed number of keys, so that neither the batch
nor the other rows change a bit (split-KV with a reduction, after Dao's FlashDecoding).

The module needs the package `triton`; only `workers.forward.backends.triton` imports it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.forward.triton.tiles import NO_QUERY, SPLIT_KEYS, Blocks, Queries

_KEY_NUMBERS = 4096
"""Numbers of the keys of one iteration: 32 keys of 128 numbers, 16 of 256. More would not fit registers."""
_PROGRAMS, _LEAST_IN_TURN = 2048, 8
"""Programs of a launch beyond which one computes several splits of its row in turn, and how many share a row at least.
In a graph there are as many splits as the longest row may have, and launching those without keys would take longer than
computing the others."""
_WORD, _NO_QUERY = tl.constexpr(64), tl.constexpr(NO_QUERY)


def key_tile(dim: int) -> int:
    """Keys of one iteration, for heads of `dim` numbers. Padded heads take more registers: they have half as many."""
    width: int = triton.next_power_of_2(dim)
    return max(16, min(32, _KEY_NUMBERS // width // (1 if dim == width else 2)))


def launch_warps(tile: int, group: int, dim: int, *, is_wide: bool) -> int:
    """Warps of a program, for tiles of so many queries of the heads that share a KV head."""
    if is_wide:
        return 4 if dim > 64 else 8
    return 8 if tile * triton.next_power_of_2(group) >= 64 or dim > 128 else 4


def paged_attention(
    queries: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
    plan: Queries,
    read: Blocks,
    output: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    sinks: int = 0,
    soft_cap: float | None = None,
    learned_sinks: torch.Tensor | None = None,
) -> None:
    """Write the attention of the plan's queries, of `queries` `[tokens, heads, dim]`, into `output` of that shape.

    `stored` are keys and values, `[blocks, block size, KV heads, dim]` each, with contiguous heads. `window` 0 is none.
    `soft_cap` bounds the products by tanh (Gemma 2, section 2). `learned_sinks` `[heads]` are logits of a key without
    a value (gpt-oss).
    """
    keys, values = stored
    heads, dim = queries.shape[1:]
    kv_heads, size = keys.shape[2], keys.shape[1]
    group = heads // kv_heads
    width = triton.next_power_of_2(dim)
    partial = plan.splits > 1
    tiles = len(plan.items) * kv_heads
    shape = (plan.splits, len(plan.tokens), heads)
    sums = torch.empty((*shape, width) if partial else (1,), dtype=torch.float32, device=queries.device)
    stats = torch.empty((2, *shape) if partial else (1,), dtype=torch.float32, device=queries.device)
    sink_logits = stats if learned_sinks is None else learned_sinks
    in_turn = min(plan.splits, max(_LEAST_IN_TURN, _PROGRAMS // max(1, tiles)))
    attend_tiles[(len(plan.items), kv_heads, in_turn)](
        queries, keys, values, output, sums, stats, sink_logits,
        plan.items, plan.tokens, plan.last, plan.positions, plan.words, plan.starts,
        read.blocks, read.order, read.counts,
        scale, soft_cap or 0.0, window, sinks, len(plan.tokens), read.blocks.shape[1], plan.splits,
        queries.stride(0), queries.stride(1), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        output.stride(0), output.stride(1),
        HEADS=heads, GROUP=group, GROUP_TILE=triton.next_power_of_2(group),
        TILE=max(plan.tile, 16 // triton.next_power_of_2(group)),  # a product has at least 16 rows
        WORDS=plan.words.shape[1], DIM=dim, WIDTH=width, SIZE=size, KEY_TILE=key_tile(dim),
        SPLIT=SPLIT_KEYS, IS_SPLIT=partial, IS_WIDE=plan.is_wide,
        HAS_CAP=soft_cap is not None, HAS_SINKS=learned_sinks is not None,
        num_warps=launch_warps(plan.tile, group, dim, is_wide=plan.is_wide), num_stages=3 if plan.is_wide else 1,
        EXACT=queries.dtype == torch.float32 or not queries.is_cuda,  # the interpreter has no products of bfloat16
    )  # fmt: skip
    if partial:
        join_splits[(len(plan.tokens), heads)](
            sums, stats, output, plan.tokens, plan.last,
            len(plan.tokens), plan.splits, output.stride(0), output.stride(1),
            HEADS=heads, DIM=dim, WIDTH=width, WORDS=plan.words.shape[1], SPLIT=SPLIT_KEYS, enable_fp_fusion=False,
        )  # fmt: skip


# Sizes that change from step to step are not specialized on: they would be compiled while serving.
@triton.jit(do_not_specialize=["window", "sinks", "query_count", "most_blocks", "splits"])
def attend_tiles(
    queries, keys, values, output, sums, stats, sink_logits,
    items, tokens, lasts, positions, words, starts, blocks, order, counts,
    scale, soft_cap, window, sinks, query_count, most_blocks, splits,
    query_token, query_head, key_slot, key_head, value_slot, value_head, output_token, output_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, TILE: tl.constexpr,
    WORDS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, KEY_TILE: tl.constexpr,
    SPLIT: tl.constexpr, IS_SPLIT: tl.constexpr, IS_WIDE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of queries, one KV head and some splits of the keys: an online softmax over the row's blocks in each."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(items + 3 * item)
    first = tl.load(items + 3 * item + 1)
    count = tl.load(items + 3 * item + 2)
    index = tl.arange(0, TILE * GROUP_TILE)
    query = first + index // GROUP_TILE
    is_query = (index // GROUP_TILE < count) & (index % GROUP_TILE < GROUP)
    head = kv_head * GROUP + index % GROUP_TILE
    token = tl.load(tokens + query, mask=is_query, other=0).to(tl.int64)
    last = tl.load(lasts + query, mask=is_query, other=_NO_QUERY)
    position = tl.load(positions + query, mask=is_query, other=0)
    start = tl.load(starts + row)
    dims = tl.arange(0, WIDTH)
    is_dim = dims < DIM
    query_place = queries + token[:, None] * query_token + head[:, None] * query_head + dims[None, :]
    query_tile = tl.load(query_place, mask=is_query[:, None] & is_dim[None, :], other=0.0)
    # A tile ends at the last position that one of its queries sees; words begin behind the prompt. The index of a block
    # among those that a row reads is at most its place in the sequence.
    reach = tl.max(tl.where(last == start - 1, start + _WORD * WORDS - 1, last), axis=0)
    row_end = tl.minimum(tl.load(counts + row), (reach + SIZE) // SIZE) * SIZE
    split_count = 1
    if IS_SPLIT:
        split_count = tl.minimum(splits, splits_seen(tl.max(last, axis=0), WORDS, SPLIT))
    for split in range(tl.program_id(2), split_count, tl.num_programs(2)):
        most = learned_sink(sink_logits, head, is_query, split, HAS_SINKS)
        total = tl.where(most == float("-inf"), 0.0, 1.0)
        result = tl.zeros([TILE * GROUP_TILE, WIDTH], tl.float32)
        begin = split * SPLIT
        end = row_end
        if IS_SPLIT:
            end = tl.minimum(end, begin + SPLIT)
        for key_first in range(begin, end, KEY_TILE):
            flat = key_first + tl.arange(0, KEY_TILE)
            is_read = flat < end
            entry = row * most_blocks + flat // SIZE
            key = tl.load(order + entry, mask=is_read, other=0) * SIZE + flat % SIZE
            slot = tl.load(blocks + entry, mask=is_read, other=0).to(tl.int64) * SIZE + flat % SIZE
            sees = sees_keys(words, query, is_query, last, position, key, is_read, start, window, sinks, WORDS)
            is_seen = tl.max(sees.to(tl.int32), axis=0) != 0
            # A load whose mask depends on what is seen cannot begin before the last iteration ends. Wide tiles gain by
            # that; narrow ones gain by reading nothing else.
            is_loaded = (is_read if IS_WIDE else is_seen)[:, None] & is_dim[None, :]
            key_tile = load_rows(keys + kv_head * key_head, slot * key_slot, dims, is_loaded)
            products = product(query_tile, tl.trans(key_tile), EXACT) * scale
            if HAS_CAP:
                products = soft_cap * tanh(products / soft_cap)
            scores = tl.where(sees, products, float("-inf"))
            highest = tl.maximum(most, tl.max(scores, axis=1))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(most - base)
            total = total * shrink + tl.sum(weights, axis=1)
            value_tile = load_rows(values + kv_head * value_head, slot * value_slot, dims, is_loaded)
            if IS_WIDE:  # what no query sees may be anything: a weight of 0 would not make a NaN 0
                value_tile = tl.where(is_seen[:, None], value_tile, 0.0)
            result = result * shrink[:, None] + product(weights, value_tile, EXACT)
            most = highest
        if not IS_SPLIT:
            result = result / tl.where(total == 0.0, 1.0, total)[:, None]
            output_place = output + token[:, None] * output_token + head[:, None] * output_head + dims[None, :]
            tl.store(output_place, result.to(output.dtype.element_ty), mask=is_query[:, None] & is_dim[None, :])
        else:
            entry = (split * query_count + query) * HEADS + head
            if begin < end:  # the join reads no sums of a split without keys
                tl.store(sums + entry[:, None] * WIDTH + dims[None, :], result, mask=is_query[:, None])
            tl.store(stats + entry, most, mask=is_query)
            tl.store(stats + splits * query_count * HEADS + entry, total, mask=is_query)


@triton.jit
def learned_sink(logits, head, is_query, split, HAS_SINKS: tl.constexpr):
    """The logit of a first key without a value, which the first split has, or that of no key."""
    most = tl.where(is_query, float("-inf"), float("-inf"))
    if HAS_SINKS:
        most = tl.where(split == 0, tl.load(logits + head, mask=is_query, other=0.0).to(tl.float32), most)
    return most


@triton.jit
def load_rows(stored, rows, dims, is_loaded):
    """The numbers at `dims` of each row, 0 where they are not loaded."""
    return tl.load(stored + rows[:, None] + dims[None, :], mask=is_loaded, other=0.0)


@triton.jit
def splits_seen(last, WORDS: tl.constexpr, SPLIT: tl.constexpr):
    """No fewer splits than have keys that a query sees whose last position is `last`."""
    return (last + _WORD * WORDS) // SPLIT + 1


@triton.jit
def tanh(value):
    """The hyperbolic tangent."""
    return 1.0 - 2.0 / (tl.exp(2.0 * value) + 1.0)


@triton.jit
def sees_keys(words, query, is_query, last, position, key, is_read, start, window, sinks, WORDS: tl.constexpr):
    """Whether each query sees each key: the keys up to its last one, within the window, and those its words name."""
    sees = key[None, :] <= last[:, None]
    if window > 0:
        sees = sees & ((position[:, None] - key[None, :] < window) | (key[None, :] < sinks))
    if WORDS > 0:
        bit = key[None, :] - start
        in_words = (bit >= 0) & (bit < _WORD * WORDS) & is_query[:, None]
        word = tl.load(words + query[:, None] * WORDS + bit // _WORD, mask=in_words, other=0)
        sees = sees | (in_words & (((word >> (bit % _WORD).to(tl.int64)) & 1) != 0))
    return sees & is_read[None, :] & is_query[:, None]


@triton.jit
def product(left, right, EXACT: tl.constexpr):
    """The product of two tiles in float32: of float32 where it is to be exact, else of the right tile's type."""
    if EXACT:
        result = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(left.to(right.dtype), right)
    return result


@triton.jit(do_not_specialize=["query_count", "splits"])
def join_splits(
    sums, stats, output, tokens, lasts, query_count, splits, output_token, output_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The softmax over the splits of one query and head that have keys which it sees. Padding becomes 0.

    The splits are added one by one: the order of a sum over a tile of splits would depend on the step's longest row.
    """
    query, head = tl.program_id(0), tl.program_id(1)
    last = tl.load(lasts + query)
    count = tl.where(last == _NO_QUERY, 0, tl.minimum(splits, splits_seen(last, WORDS, SPLIT)))
    dims = tl.arange(0, WIDTH)
    most = float("-inf")
    for split in range(count):
        most = tl.maximum(most, tl.load(stats + (split * query_count + query) * HEADS + head))
    base = tl.where(most == float("-inf"), 0.0, most)
    whole = 0.0
    result = tl.zeros([WIDTH], tl.float32)
    for split in range(count):
        entry = (split * query_count + query) * HEADS + head
        total = tl.load(stats + splits * query_count * HEADS + entry)
        if total > 0.0:  # a split without keys has no sums
            weight = tl.exp(tl.load(stats + entry) - base)
            whole += total * weight
            result += tl.load(sums + entry * WIDTH + dims) * weight
    token = tl.load(tokens + query).to(tl.int64)
    place = output + token * output_token + head * output_head + dims
    result = result / tl.where(whole == 0.0, 1.0, whole)
    tl.store(place, result.to(output.dtype.element_ty), mask=dims < DIM)
