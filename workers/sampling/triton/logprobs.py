"""One pass over the logits for log-probabilities: ranks of tokens, sums of exponentials, and the largest of each block.

Sums are of float64. Each tile of a row and then the row's tiles are added in an order that its length alone decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 2048
"""Columns of a program."""
_NUMBERS = tl.constexpr(3)
"""Numbers of a tile: its largest logit, the sum of its exponentials relative to that, and its tokens that are ahead."""
_MOST = tl.constexpr(3.4028234663852886e38)


def read_rows(logits: torch.Tensor, tokens: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What one pass over logits `[n, size]`, with contiguous rows, finds for `tokens`, int64 `[n]`.

    Returns the rank of each row's token, the logarithm of the row's sum and the token's logit, float64 `[n, 3]`, and
    the largest logit of each block of so many columns, float32 `[n, blocks]`. NaN counts as minus infinity, and plus
    infinity as the largest float32.
    """
    rows, size = logits.shape
    tiles, blocks = triton.cdiv(size, _TILE), triton.cdiv(size, block)
    parts = torch.empty((rows, tiles, _NUMBERS.value), dtype=torch.float64, device=logits.device)
    numbers = torch.empty((rows, 3), dtype=torch.float64, device=logits.device)
    largest = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    read_tile[(rows, tiles)](
        logits, tokens, parts, largest, size, logits.stride(0), blocks, COUNT=_TILE, BLOCK=block, num_warps=8
    )
    join_parts[(rows,)](logits, tokens, parts, numbers, tiles, logits.stride(0), TILES=triton.next_power_of_2(tiles))
    return numbers, largest


@triton.jit
def read_tile(
    logits, tokens, parts, largest, size, stride, blocks, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The numbers of one tile of a row, and the largest logit of each of its blocks."""
    row, tile = tl.program_id(0), tl.program_id(1)
    column = tile * COUNT + tl.arange(0, COUNT)
    start = logits + row.to(tl.int64) * stride
    token = tl.load(tokens + row)
    value = clean(tl.load(start + column, mask=column < size, other=float("-inf")))
    own = clean(tl.load(start + token))
    ahead = ((value > own) | ((value == own) & (column < token))) & (column < size)
    most = tl.max(value, axis=0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(tl.exp(value.to(tl.float64) - base.to(tl.float64)), axis=0)
    place = parts + (row.to(tl.int64) * tl.num_programs(1) + tile) * _NUMBERS
    tl.store(place, most.to(tl.float64))
    tl.store(place + 1, total)
    tl.store(place + 2, tl.sum(ahead.to(tl.int32), axis=0).to(tl.float64))
    block = tile * (COUNT // BLOCK) + tl.arange(0, COUNT // BLOCK)
    best = tl.max(tl.reshape(value, [COUNT // BLOCK, BLOCK]), axis=1)
    tl.store(largest + row.to(tl.int64) * blocks + block, best, mask=block < blocks)


@triton.jit(do_not_specialize=["tiles"])
def join_parts(logits, tokens, parts, numbers, tiles, stride, TILES: tl.constexpr):
    """The rank of a row's token, the logarithm of the row's sum, and the token's logit."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    place = parts + (row.to(tl.int64) * tiles + tile) * _NUMBERS
    most = tl.load(place, mask=tile < tiles, other=float("-inf"))
    total = tl.load(place + 1, mask=tile < tiles, other=0.0)
    ahead = tl.load(place + 2, mask=tile < tiles, other=0.0)
    base = tl.max(most, axis=0)
    base = tl.where(base == float("-inf"), 0.0, base)
    own = clean(tl.load(logits + row.to(tl.int64) * stride + tl.load(tokens + row)))
    tl.store(numbers + row * 3, 1.0 + tl.sum(ahead, axis=0))
    whole = tl.sum(total * tl.exp(most - base), axis=0)
    found = tl.log(tl.where(whole == 0.0, 1.0, whole)) + base
    tl.store(numbers + row * 3 + 1, tl.where(whole == 0.0, float("-inf"), found))
    tl.store(numbers + row * 3 + 2, own.to(tl.float64))


@triton.jit
def clean(logit):
    """Logits in float32, without NaN and plus infinity."""
    logit = logit.to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    return tl.minimum(logit, _MOST)
