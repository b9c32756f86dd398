"""The norms of heads, the rotary embedding of queries and keys, and the store of keys and values, in one launch.

`Projections.rotated` and then `KvStore.write` are the reference, with their roundings between the steps. One program
computes one token, so no token depends on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.forward.projections import Projections
from workers.forward.triton.eight_bits import StoredLayer, store_heads
from workers.forward.triton.kv_write import finite

_WARP_NUMBERS = 1024
"""Numbers of the queries of a token that one warp holds."""


def rotate_and_write(fresh: Projections, slots: torch.Tensor, stored: StoredLayer) -> torch.Tensor:
    """Store keys and values at `slots`, int64 `[tokens]`. Returns the rotated queries `[tokens, heads, dim]`."""
    keys, values = stored.keys, stored.values
    tokens, dim = len(fresh.queries), fresh.dim
    heads, kv_heads = fresh.queries.shape[1] // dim, keys.shape[2]
    output = torch.empty((tokens, heads, dim), dtype=fresh.queries.dtype, device=fresh.queries.device)
    norms = fresh.norms
    query_weight, key_weight = (fresh.cosines,) * 2 if norms is None else (norms.queries, norms.keys)
    rotate_token[(tokens,)](
        fresh.queries, fresh.keys, fresh.values, fresh.cosines, fresh.sines, query_weight, key_weight,
        output, keys, values, stored.key_scales, stored.value_scales, slots, 0.0 if norms is None else norms.epsilon,
        fresh.queries.stride(0), fresh.keys.stride(0), fresh.values.stride(0),
        fresh.cosines.stride(0), fresh.sines.stride(0),
        keys.stride(1), keys.stride(2), values.stride(1), values.stride(2), stored.scale_slot,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, TURNED=fresh.cosines.shape[1],
        WIDTH=triton.next_power_of_2(dim), HEAD_TILE=triton.next_power_of_2(heads),
        KV_TILE=triton.next_power_of_2(kv_heads), HAS_NORMS=norms is not None,
        MOST=torch.finfo(fresh.keys.dtype).max, KIND=stored.kind,
        num_warps=rotary_warps(heads, dim),
    )  # fmt: skip
    return output


def rotary_warps(heads: int, dim: int) -> int:
    """Warps of a token."""
    numbers: int = triton.next_power_of_2(heads) * triton.next_power_of_2(dim)
    return max(1, min(16, numbers // _WARP_NUMBERS))


@triton.jit
def rotate_token(
    queries, keys, values, cosines, sines, query_weight, key_weight,
    output, stored_keys, stored_values, key_scales, value_scales, slots, epsilon,
    query_token, key_token, value_token, cosine_token, sine_token,
    key_slot, key_slot_head, value_slot, value_slot_head, scale_slot,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr,
    HEAD_TILE: tl.constexpr, KV_TILE: tl.constexpr, HAS_NORMS: tl.constexpr, MOST: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Rotate the queries and the key of one token, and store its key and its value."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    cosine, sine = cosines + token * cosine_token, sines + token * sine_token
    dim = tl.arange(0, WIDTH)[None, :]
    head = tl.arange(0, HEAD_TILE)[:, None]
    query = rotated(
        queries + token * query_token, head, HEADS, query_weight, cosine, sine, epsilon, DIM, TURNED, WIDTH, HAS_NORMS
    )
    tl.store(output + (token * HEADS + head) * DIM + dim, query, mask=(head < HEADS) & (dim < DIM))
    kv_head = tl.arange(0, KV_TILE)[:, None]
    key = rotated(
        keys + token * key_token, kv_head, KV_HEADS, key_weight, cosine, sine, epsilon, DIM, TURNED, WIDTH, HAS_NORMS
    )
    is_number = (kv_head < KV_HEADS) & (dim < DIM)
    value = tl.load(values + token * value_token + kv_head * DIM + dim, mask=is_number, other=0.0)
    if KIND == 0:
        tl.store(stored_keys + slot * key_slot + kv_head * key_slot_head + dim, finite(key, MOST), mask=is_number)
        value_place = stored_values + slot * value_slot + kv_head * value_slot_head + dim
        tl.store(value_place, finite(value, MOST), mask=is_number)
    else:
        is_head = kv_head < KV_HEADS
        store_heads(
            key, is_number, kv_head, dim, is_head, stored_keys, key_scales, slot, key_slot, key_slot_head, scale_slot,
            KIND,
        )  # fmt: skip
        store_heads(
            value, is_number, kv_head, dim, is_head, stored_values, value_scales, slot, value_slot, value_slot_head,
            scale_slot, KIND,
        )  # fmt: skip


@triton.jit
def rotated(
    source, head, HEADS: tl.constexpr, weight, cosines, sines, epsilon,
    DIM: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """The heads of one token, `[head tile, WIDTH]`, normalized and rotated."""
    dim = tl.arange(0, WIDTH)[None, :]
    half: tl.constexpr = TURNED // 2
    partner = tl.where(dim < half, dim + half, tl.where(dim < TURNED, dim - half, dim))
    is_number = (head < HEADS) & (dim < DIM)
    own = tl.load(source + head * DIM + dim, mask=is_number, other=0.0)
    other = tl.load(source + head * DIM + partner, mask=is_number, other=0.0)
    kind = own.dtype
    wide, wide_other = own.to(tl.float32), other.to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + epsilon)[:, None]
        factor = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        other_factor = tl.load(weight + partner, mask=dim < DIM, other=0.0).to(tl.float32)
        wide = ((wide * scale).to(kind).to(tl.float32) * factor).to(kind).to(tl.float32)
        wide_other = ((wide_other * scale).to(kind).to(tl.float32) * other_factor).to(kind).to(tl.float32)
    cosine = tl.load(cosines + dim, mask=dim < TURNED, other=0.0).to(tl.float32)
    sine = tl.load(sines + dim, mask=dim < TURNED, other=0.0).to(tl.float32)
    across = tl.where(dim < half, -wide_other, wide_other)
    turned = (wide * cosine).to(kind).to(tl.float32) + (across * sine).to(kind).to(tl.float32)
    return tl.where(dim < TURNED, turned, wide).to(kind)
