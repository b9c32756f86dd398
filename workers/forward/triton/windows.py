"""Triton kernels for attention over the windows of a drafting module: the rows of a pass in one launch.

A window holds the keys and values of one sequence in a tensor of its own. The kernels find it by its address, which is
in a table beside its strides, so nothing is gathered. A mask says which slots a query sees, because any slot may be
unknown and drafts are trees.

The keys of a piece are divided into splits whose size depends on the piece alone, so no other piece changes a bit. The
program that finishes the last split of a tile joins them, in their order, as in `workers.forward.triton.attention`.

The module needs the package `triton`; only `workers.forward.window_attention` imports it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.forward.triton.attention import (
    entries_of_tile,
    is_last_program,
    joined,
    load_rows,
    product,
    queries_of_tile,
    store_finished,
    store_part,
    weighed,
)
from workers.forward.triton.kv_write import finite
from workers.forward.triton.tiles import WindowTiles, padded_width

_PROGRAMS, _LEAST_IN_TURN = 2048, 8
"""Programs of a launch beyond which one computes several splits of its piece in turn, and the fewest for a piece."""
_LOADED = 4
"""Numbers of float32 that a thread loads at once, where heads have a multiple of them."""
_KEY_NUMBERS, _MOST_KEYS, _STAGES = 4096, 64, 2
"""Numbers of the keys of one iteration, most keys, and iterations that are loaded ahead. Of float32, more keys would
not fit registers on GPUs before Hopper."""
_KEYS, _VALUES, _LAYER, _HEAD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_END, _SPLIT, _MASK, _MASK_TOKEN, _FIRST = (tl.constexpr(field) for field in range(4, 9))
_FIELDS = tl.constexpr(9)
"""The fields of a piece in the table of `WindowTiles`."""


def write_windows(keys: torch.Tensor, values: torch.Tensor, tiles: WindowTiles, layer: int) -> None:
    """Store float32 `keys` `[tokens, KV heads, dim]` and `values` `[tokens, KV heads, value dim]` in their windows.

    Heads are contiguous. NaN becomes 0, and infinities the largest finite numbers: a later token may read them, masked.
    """
    _store(keys[None], values[None], tiles, layer)


def write_layers(keys: torch.Tensor, values: torch.Tensor, tiles: WindowTiles) -> None:
    """Store `keys` `[layers, tokens, KV heads, dim]` and `values` of all layers, as `write_windows` does of one."""
    _store(keys, values, tiles, 0)


def _store(keys: torch.Tensor, values: torch.Tensor, tiles: WindowTiles, first: int) -> None:
    """Store what belongs to the layers from the first one on."""
    layers, tokens, heads, dim = keys.shape
    store_windows[(tokens, layers)](
        keys, values, tiles.table, tiles.places, first,
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        HEADS=heads, DIM=dim, VALUE_DIM=values.shape[3], WIDTH=triton.next_power_of_2(heads * dim),
        MOST=torch.finfo(torch.float32).max,
    )  # fmt: skip


def window_attention(
    queries: torch.Tensor, tiles: WindowTiles, layer: int, kv_heads: int, value_dim: int, scale: float
) -> torch.Tensor:
    """The attention of float32 `queries` `[tokens, heads, dim]`, whose heads are contiguous, to what they see.

    `scale` multiplies the products of queries and keys. Returns float32 `[tokens, heads, value dim]`.
    """
    tokens, heads, dim = queries.shape
    group = heads // kv_heads
    width, value_width = padded_width(dim), padded_width(value_dim)
    output = queries.new_empty((tokens, heads, value_dim))
    shape = (tiles.splits, tiles.split_queries, heads) if tiles.splits > 1 else (1, 1, heads)
    sums, stats = queries.new_empty((*shape, value_width)), queries.new_empty((2, *shape))
    count = len(tiles.items)
    in_turn = min(tiles.splits, max(_LEAST_IN_TURN, _PROGRAMS // max(1, count * kv_heads)))
    attend_windows[(count, kv_heads, in_turn)](
        queries, output, sums, stats, tiles.arrivals, tiles.table, tiles.items, tiles.tokens, tiles.masks,
        scale, layer, shape[1], shape[0], queries.stride(0), queries.stride(1), output.stride(0), output.stride(1),
        HEADS=heads, GROUP=group, GROUP_TILE=triton.next_power_of_2(group),
        TILE=max(tiles.tile, 16 // triton.next_power_of_2(group)),  # a product has at least 16 rows
        DIM=dim, WIDTH=width, VALUE_DIM=value_dim, VALUE_WIDTH=value_width, KEY_TILE=keys_of(dim),
        IS_ALIGNED=dim % _LOADED == 0, num_stages=_STAGES,
    )  # fmt: skip
    return output


def keys_of(dim: int) -> int:
    """Keys of one iteration: a power of two that divides 64."""
    return max(16, min(_MOST_KEYS, _KEY_NUMBERS // padded_width(dim)))


@triton.jit
def address(field, IS_ALIGNED: tl.constexpr):
    """The address of float32 numbers in a field of the table. Aligned ones are loaded in fours."""
    found = tl.load(field).to(tl.pointer_type(tl.float32))
    if IS_ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit(do_not_specialize=["first", "key_layer", "value_layer"])
def store_windows(
    keys, values, table, places, first, key_layer, key_token, key_head, value_layer, value_token, value_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Store the key and the value of one token in one layer."""
    token, number = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    own, slot = table + tl.load(places + 2 * token) * _FIELDS, tl.load(places + 2 * token + 1).to(tl.int64)
    index = tl.arange(0, WIDTH)
    head, dim = index // DIM, index % DIM
    is_key = head < HEADS
    is_value = is_key & (dim < VALUE_DIM)
    place = (first + number) * tl.load(own + _LAYER) + head * tl.load(own + _HEAD) + slot * DIM + dim
    key_row, value_row = number * key_layer + token * key_token, number * value_layer + token * value_token
    key = tl.load(keys + key_row + head * key_head + dim, mask=is_key, other=0.0)
    value = tl.load(values + value_row + head * value_head + dim, mask=is_value, other=0.0)
    tl.store(address(own + _KEYS, False) + place, finite(key, MOST), mask=is_key)
    tl.store(address(own + _VALUES, False) + place, finite(value, MOST), mask=is_value)


# Sizes that change from step to step are not specialized on: they would be compiled while serving.
@triton.jit(do_not_specialize=["layer", "split_queries", "splits"])
def attend_windows(
    queries, output, sums, stats, arrivals, table, items, tokens, masks, scale, layer, split_queries, splits,
    query_token, query_head, output_token, output_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_TILE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """One tile of queries, one KV head and some splits of the slots: an online softmax over each split."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    own = items + 3 * item
    piece, query, is_query, head = queries_of_tile(own, kv_head, GROUP, GROUP_TILE, TILE)
    of_piece = table + piece * _FIELDS
    token = tl.load(tokens + query, mask=is_query, other=0).to(tl.int64)
    dims, value_dims = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    query_row = token * query_token + head * query_head
    query_tile = load_rows(queries, query_row, dims, is_query[:, None] & (dims < DIM)[None, :])
    place = layer * tl.load(of_piece + _LAYER) + kv_head * tl.load(of_piece + _HEAD)
    if IS_ALIGNED:
        place = tl.multiple_of(place, 4)
    keys, values = address(of_piece + _KEYS, IS_ALIGNED) + place, address(of_piece + _VALUES, IS_ALIGNED) + place
    end, split = tl.load(of_piece + _END).to(tl.int32), tl.load(of_piece + _SPLIT).to(tl.int32)
    mask = tl.load(of_piece + _MASK)
    masked_end = tl.where(mask < 0, 0, end)
    seen = masks + mask + (token - tl.load(of_piece + _FIRST)) * tl.load(of_piece + _MASK_TOKEN)
    split_count = (end + split - 1) // tl.maximum(split, 1)
    span = split_queries.to(tl.int64) * HEADS
    for number in range(tl.program_id(2), split_count, tl.num_programs(2)):
        split_end = tl.minimum(end, (number + 1) * split)
        most = tl.where(is_query, float("-inf"), float("-inf"))
        total = tl.zeros([TILE * GROUP_TILE], tl.float32)
        result = tl.zeros([TILE * GROUP_TILE, VALUE_WIDTH], tl.float32)
        for begin in range(number * split, split_end, KEY_TILE):
            key = begin + tl.arange(0, KEY_TILE)
            is_read = key < split_end
            slot = key.to(tl.int64) * DIM
            key_tile = load_rows(keys, slot, dims, is_read[:, None] & (dims < DIM)[None, :])
            products = product(query_tile, tl.trans(key_tile), True) * scale
            is_masked = is_query[:, None] & (key < masked_end)[None, :]
            sees = tl.load(seen[:, None] + key[None, :], mask=is_masked, other=1) != 0
            weights, shrink, most = weighed(tl.where(sees & is_read[None, :], products, float("-inf")), most)
            total = total * shrink + tl.sum(weights, axis=1)
            value_tile = load_rows(values, slot, value_dims, is_read[:, None] & (value_dims < VALUE_DIM)[None, :])
            result = result * shrink[:, None] + product(weights, value_tile, True)
        if split_count == 1:
            store_finished(most, total, result, output, stats, own, tokens, kv_head, output_token, output_head,
                           GROUP, GROUP_TILE, TILE, VALUE_DIM, VALUE_WIDTH, False)  # fmt: skip
        else:
            store_part(most, total, result, sums, stats, number, splits, span, own, kv_head,
                       HEADS, GROUP, GROUP_TILE, TILE, VALUE_WIDTH)  # fmt: skip
    if is_last_program(arrivals + item * tl.num_programs(1) + kv_head, split_count):
        entry, is_entry = entries_of_tile(own, kv_head, HEADS, GROUP, GROUP_TILE, TILE)
        most, total, result = joined(sums, stats, entry, is_entry, value_dims, split_count, splits, span, VALUE_WIDTH)
        store_finished(most, total, result, output, stats, own, tokens, kv_head, output_token, output_head,
                       GROUP, GROUP_TILE, TILE, VALUE_DIM, VALUE_WIDTH, False)  # fmt: skip
