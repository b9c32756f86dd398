"""The keys and values of a step's tokens into the pool's blocks, in one launch.

`KvStore.write` is the reference: NaN becomes 0, and infinities the largest finite numbers, because the next sequence
that gets a block may read it, masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, stored: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Store `keys` and `values` `[tokens, heads, dim]` with contiguous heads at `slots`, int64 `[tokens]`.

    `stored` are keys and values, `[blocks, block size, heads, dim]` each, with contiguous heads.
    """
    tokens, heads, dim = keys.shape
    stored_keys, stored_values = stored
    store_tokens[(tokens,)](
        keys, values, stored_keys, stored_values, slots,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        stored_keys.stride(1), stored_keys.stride(2), stored_values.stride(1), stored_values.stride(2),
        HEADS=heads, DIM=dim, WIDTH=triton.next_power_of_2(heads * dim),
        MOST=torch.finfo(stored_keys.dtype).max,
    )  # fmt: skip


@triton.jit
def store_tokens(
    keys, values, stored_keys, stored_values, slots,
    key_token, key_head, value_token, value_head, key_slot, key_slot_head, value_slot, value_slot_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Store the key and the value of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    index = tl.arange(0, WIDTH)
    head, dim = index // DIM, index % DIM
    is_number = head < HEADS
    key = tl.load(keys + token * key_token + head * key_head + dim, mask=is_number, other=0.0)
    value = tl.load(values + token * value_token + head * value_head + dim, mask=is_number, other=0.0)
    tl.store(stored_keys + slot * key_slot + head * key_slot_head + dim, finite(key, MOST), mask=is_number)
    tl.store(stored_values + slot * value_slot + head * value_slot_head + dim, finite(value, MOST), mask=is_number)


@triton.jit
def finite(number, MOST: tl.constexpr):
    """The number, with NaN as 0 and infinities as the largest finite numbers."""
    wide = number.to(tl.float32)
    wide = tl.where(wide == wide, wide, 0.0)
    wide = tl.where(wide > MOST, MOST, tl.where(wide < -MOST, -MOST, wide))
    return wide.to(number.dtype)
