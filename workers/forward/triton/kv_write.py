"""The keys and values of a step's tokens into the pool's blocks, in one launch.

`KvStore.write` is the reference: NaN becomes 0, and infinities the largest finite numbers, because the next sequence
that gets a block may read it, masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.forward.triton.eight_bits import AS_IT_IS, StoredLayer, store_heads


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, stored: StoredLayer, *, is_latent: bool = False
) -> None:
    """Store `keys` and `values` `[tokens, heads, dim]` with contiguous heads at `slots`, int64 `[tokens]`.

    With `is_latent`, the keys hold their values, and are stored alone.
    """
    tokens, heads, dim = keys.shape
    has_values = not is_latent
    stored_keys, stored_values = stored.keys, stored.values
    if stored.kind != AS_IT_IS:
        quantize_tokens[(tokens, 1 + has_values)](
            keys, values, stored_keys, stored_values, stored.key_scales, stored.value_scales, slots,
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            stored_keys.stride(1), stored_keys.stride(2), stored.scale_slot,
            HEADS=heads, DIM=dim, HEAD_TILE=triton.next_power_of_2(heads), WIDTH=triton.next_power_of_2(dim),
            KIND=stored.kind,
        )  # fmt: skip
        return
    store_tokens[(tokens,)](
        keys, values, stored_keys, stored_values, slots,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        stored_keys.stride(1), stored_keys.stride(2), stored_values.stride(1), stored_values.stride(2),
        HEADS=heads, DIM=dim, WIDTH=triton.next_power_of_2(heads * dim),
        MOST=torch.finfo(stored_keys.dtype).max, HAS_VALUES=has_values,
    )  # fmt: skip


@triton.jit
def store_tokens(
    keys, values, stored_keys, stored_values, slots,
    key_token, key_head, value_token, value_head, key_slot, key_slot_head, value_slot, value_slot_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr, HAS_VALUES: tl.constexpr,
):  # fmt: skip
    """Store the key and the value of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    index = tl.arange(0, WIDTH)
    head, dim = index // DIM, index % DIM
    is_number = head < HEADS
    key = tl.load(keys + token * key_token + head * key_head + dim, mask=is_number, other=0.0)
    tl.store(stored_keys + slot * key_slot + head * key_slot_head + dim, finite(key, MOST), mask=is_number)
    if HAS_VALUES:
        value = tl.load(values + token * value_token + head * value_head + dim, mask=is_number, other=0.0)
        tl.store(stored_values + slot * value_slot + head * value_slot_head + dim, finite(value, MOST), mask=is_number)


@triton.jit
def quantize_tokens(
    keys, values, stored_keys, stored_values, key_scales, value_scales, slots,
    key_token, key_head, value_token, value_head, slot_stride, head_stride, scale_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_TILE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Quantize and store the key of one token, or its value."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head, dim = tl.arange(0, HEAD_TILE)[:, None], tl.arange(0, WIDTH)[None, :]
    is_head = head < HEADS
    is_number = is_head & (dim < DIM)
    if tl.program_id(1) == 0:
        key = tl.load(keys + token * key_token + head * key_head + dim, mask=is_number, other=0.0)
        store_heads(
            key, is_number, head, dim, is_head, stored_keys, key_scales, slot, slot_stride, head_stride, scale_stride,
            KIND,
        )  # fmt: skip
    else:
        value = tl.load(values + token * value_token + head * value_head + dim, mask=is_number, other=0.0)
        store_heads(
            value, is_number, head, dim, is_head, stored_values, value_scales, slot, slot_stride, head_stride,
            scale_stride, KIND,
        )  # fmt: skip


@triton.jit
def finite(number, MOST: tl.constexpr):
    """The number, with NaN as 0 and infinities as the largest finite numbers."""
    wide = number.to(tl.float32)
    wide = tl.where(wide == wide, wide, 0.0)
    wide = tl.where(wide > MOST, MOST, tl.where(wide < -MOST, -MOST, wide))
    return wide.to(number.dtype)
