"""What kernels are told of a step: tiles of queries, the blocks that each row reads, and how many rows one program has.

These are plain tensors, so a step is planned without the package `triton`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from workers.kv.groups import AttentionWindow

SPLIT_KEYS = 512
"""Positions of one split. All rows are divided at the same positions, so a row's sums depend on the row alone."""
NO_QUERY = -2
"""The last position of a query that is padding. A query that sees no stored token has -1."""
MOST_NORMALIZED = 4
"""Most rows that one program normalizes after a product, one after another. A launch of a program for each takes about
2 µs on an H200, whatever their number."""
_WIDE_ROWS, _MOST_NUMBERS = 64, 8192
"""Rows of the products of wide tiles, queries times the heads that share a KV head, and most numbers of their results:
64 rows of 128 numbers, 32 of 256. More would not fit registers."""
LEAST_ROWS = 16
"""Rows of a product on tensor cores, at least."""
_NARROW_QUERIES, _NARROW_ROWS, _NARROW_NUMBERS = 4, 32, 4096
"""Most queries of a narrow tile, unless the fewest rows of its products hold more, and most rows of its products and
numbers of their results, unless one query has more. More would not leave room for other programs beside it."""
_TALL_QUERIES, _TALL_GROUP, _TALL_WIDTH = 8, 4, 128
"""Queries of a tall tile, and the padded numbers of heads and most numbers of a head for which it is proved."""
HOPPER = 90
"""The compute capability of Hopper."""


def wide_tile(heads_per_kv: int, head_dim: int) -> int:
    """Queries of a tile of a prompt, a power of two."""
    group, width = (1 << (number - 1).bit_length() for number in (heads_per_kv, head_dim))
    return max(1, min(_WIDE_ROWS, _MOST_NUMBERS // width) // group)


def narrow_tile(heads_per_kv: int, head_dim: int) -> int:
    """Queries of a tile of a row of up to 64 tokens, a power of two."""
    group, width = (1 << (number - 1).bit_length() for number in (heads_per_kv, head_dim))
    most = max(_NARROW_QUERIES, LEAST_ROWS // group)
    return max(1, min(most, min(_NARROW_ROWS, _NARROW_NUMBERS // width) // group))


def tall_tile(heads_per_kv: int, head_dim: int) -> int:
    """Queries of a tile of a row of 5 to 64 tokens, where such a row may have larger tiles than others.

    Eight tokens of four heads then read the keys once. From Hopper on, registers hold what these tiles need, without
    soft caps, learned sinks and numbers of E4M3.
    """
    group, width = (1 << (number - 1).bit_length() for number in (heads_per_kv, head_dim))
    is_proved = group == _TALL_GROUP and width <= _TALL_WIDTH
    return _TALL_QUERIES if is_proved else narrow_tile(heads_per_kv, head_dim)


def short_tile(group: int, tile: int) -> int:
    """Up to how many queries of a narrow tile have the fewest products. `group` is the padded number of heads."""
    return LEAST_ROWS // group if group == _TALL_GROUP and tile == _TALL_QUERIES else tile


def window_tile(heads_per_kv: int, head_dim: int) -> int:
    """Queries of a tile over the window of a drafting module, a power of two."""
    return min(_NARROW_QUERIES, narrow_tile(heads_per_kv, head_dim))


@lru_cache
def capability_of(device: torch.device) -> int:
    """The compute capability, 90 for Hopper, and that one where kernels are interpreted or counted."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def most_splits(blocks: int, size: int, window: AttentionWindow) -> int:
    """The most splits of a row that reads so many blocks of `size` tokens, which begin anywhere under a window."""
    return -(-blocks * size // SPLIT_KEYS) + (0 if window.size is None else 2)


def padded_width(dim: int) -> int:
    """Numbers of a program's row that holds `dim` numbers: a power of two, and at least 16 for products."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Tiles of queries of rows that are computed alike, and what each query sees. int32 unless said otherwise."""

    items: torch.Tensor
    """`[tiles, 3]`: row, first query, number of queries, which may be 0."""
    tokens: torch.Tensor
    """`[queries]`: the token of the step that a query is."""
    last: torch.Tensor
    """`[queries]`: the last position that a query sees, those of its words apart; -2 for padding."""
    positions: torch.Tensor
    """`[queries]`: position of a query, for its window."""
    words: torch.Tensor
    """int64 `[queries, words]`: bit `i % 64` of word `i // 64` says whether a query sees position `starts[row] + i`.
    Without trees there are no words."""
    starts: torch.Tensor
    """`[rows]`: position of the first bit of the first word."""
    tile: int
    """Queries of a tile, a power of two."""
    is_wide: bool
    """Whether these are the queries of prompts, in wide tiles."""
    arrivals: torch.Tensor
    """`[tiles x KV heads]`, 0: counts programs that have finished their splits, and is 0 again after each launch."""
    splits: int
    """The most splits that a row may have; a wide row has one."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks that each row reads, in ascending order of their positions. int32."""

    blocks: torch.Tensor
    """`[rows, most blocks]`: block of the pool."""
    order: torch.Tensor
    """`[rows, most blocks]`: index of the block in its sequence."""
    counts: torch.Tensor
    """`[rows]`: number of blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowTiles:
    """Tiles of queries of a drafting module's pass, and where the windows of its pieces are."""

    table: torch.Tensor
    """int64 `[pieces, 9]`: addresses of keys and of values, float32 `[layers, KV heads, slots, dim]`; strides of a
    layer and of a head; slots that are read; slots of a split, a multiple of 64 or all; first byte of the mask, or -1
    where everything is seen; bytes of the mask between two tokens; the first token."""
    items: torch.Tensor
    """int32 `[tiles, 3]`: piece, first query, number of queries."""
    tokens: torch.Tensor
    """int32 `[queries]`: the token of the pass that a query is. Queries of pieces with several splits are first."""
    places: torch.Tensor
    """int32 `[tokens, 2]`: piece and slot of each token."""
    masks: torch.Tensor
    """uint8 `[bytes]`: for a token and a slot of its piece whether the token sees the slot."""
    arrivals: torch.Tensor
    """int32 `[tiles x KV heads]`: as in `Queries`."""
    tile: int
    """Queries of a tile, a power of two."""
    split_queries: int
    """Queries of pieces that may have several splits."""
    splits: int
    """The most splits that a piece may have."""
