"""Attention over the windows of a drafting module, where the CPU kernels do not compute its layers.

On GPUs all pieces of a pass are one launch to store keys and values and one to attend, by the Triton kernels of
`workers.forward.triton.windows`. Elsewhere torch computes one piece after another, which is also the reference.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from workers.forward.backends.base import PackedPlan, with_whole_heads
from workers.forward.graph_sizes import DraftingSize
from workers.forward.native.window_layers import WindowPiece
from workers.forward.triton.tiles import SPLIT_KEYS, WindowTiles, window_tile
from workers.transfer import (
    StepArray,
    joined,
    onto,
    split_together,
    tensor_on,
    to_device_together,
    words_together,
)

logger = logging.getLogger(__name__)

MOST_SPLITS = 16
"""Most splits of a piece. Their sums are in memory: with more, those of a long text would take gigabytes."""
_MOST_SPLIT_TOKENS = 16
"""Most tokens of a piece with several splits. Those of others are work enough for many programs."""
_UNIT = 64
_TRIAL_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class WindowHeads:
    """The heads of a module's attention."""

    heads: int
    kv_heads: int
    width: int
    """Numbers of a query and of a key; a slot has as many for a value."""
    value_width: int
    """Numbers of a value, at most those of a key."""


class WindowKernels(Protocol):
    """The module `workers.forward.triton.windows`."""

    def write_windows(self, keys: Tensor, values: Tensor, tiles: WindowTiles, layer: int) -> None:
        """Store keys and values."""

    def write_layers(self, keys: Tensor, values: Tensor, tiles: WindowTiles) -> None:
        """Store keys and values `[layers, tokens, KV heads, dim]` of all layers."""

    def window_attention(
        self, queries: Tensor, tiles: WindowTiles, layer: int, kv_heads: int, value_dim: int, scale: float
    ) -> Tensor:
        """Attend."""


class WindowStep(Protocol):
    """The attention of one pass."""

    @property
    def positions(self) -> Tensor:
        """The positions of the pass's tokens, int64 [tokens]."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None = None) -> Tensor:
        """Write the keys and values of all pieces, and attend to them.

        `queries` are [tokens, heads, width], `keys` [tokens, KV heads, width] and `values` [tokens, KV heads, value
        width], all float32: all pieces' tokens, one after another. `scaling` multiplies the products of queries and
        keys; `None` stands for width ** -0.5. Returns float32 [tokens, heads × value width].
        """


class WindowAttention:
    """Plans the passes of a module with these heads on a device."""

    def __init__(self, heads: WindowHeads, device: torch.device) -> None:
        """The kernels are compiled and tried here, so that nothing is compiled while serving."""
        self.heads, self.device = heads, device
        self.kernels = kernels_for(heads, device)
        """The kernels; `None` where torch attends to one piece after another, which no CUDA graph can hold."""

    def plan(self, pieces: Sequence[WindowPiece], positions: Sequence[int]) -> WindowStep:
        """The attention of a pass over `pieces`, whose tokens are at `positions`. No two pieces share slots."""
        if self.kernels is None:
            return LoopedWindows(pieces, tensor_on(self.device, positions, torch.int64), self.device)
        planned = plan_tiles(pieces, positions, self.heads)
        found, tiles = planned.metadata(to_device_together(planned.arrays, self.device))
        return TiledWindows(self.kernels, pieces, tiles, found)

    def store(self, pieces: Sequence[WindowPiece], keys: Tensor, values: Tensor) -> None:
        """Write float32 `keys` `[layers, tokens, KV heads, width]` and `values` of all layers, in one launch.

        The tokens are those of all pieces, one after another. Raises `ValueError` without kernels.
        """
        if self.kernels is None:
            raise ValueError("keys and values of several pieces are stored together by kernels alone")
        planned = plan_tiles(pieces, range(keys.shape[1]), self.heads)
        _, tiles = planned.metadata(to_device_together(planned.arrays, self.device))
        self.kernels.write_layers(keys, values, tiles)


class LoopedWindows:
    """`WindowStep` by torch, one piece after another."""

    def __init__(self, pieces: Sequence[WindowPiece], positions: Tensor, device: torch.device) -> None:
        self.positions = positions
        self._pieces = pieces
        self._masks = [None if piece.is_seen is None else onto(device, piece.is_seen) for piece in pieces]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None = None) -> Tensor:
        attended, first, width = [], 0, values.shape[-1]
        for piece, mask in zip(self._pieces, self._masks, strict=True):
            part = slice(first, first + piece.count)
            all_keys, all_values = piece.keys[layer, :, : piece.end], piece.values[layer, :, : piece.end, :width]
            all_keys[:, piece.slot :] = keys[part].transpose(0, 1)
            all_values[:, piece.slot :] = values[part].transpose(0, 1)
            attended.append(_attend(queries[part], all_keys, all_values, mask, scaling))
            first += piece.count
        return torch.cat(attended)


class TiledWindows:
    """`WindowStep` by the kernels. The tiles have addresses alone, so it holds the pieces, and these their windows."""

    def __init__(
        self, kernels: WindowKernels, pieces: Sequence[WindowPiece], tiles: WindowTiles, positions: Tensor
    ) -> None:
        self.positions = positions
        self._kernels, self._pieces, self._tiles = kernels, pieces, tiles

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None = None) -> Tensor:
        queries, keys, values = map(with_whole_heads, (queries, keys, values))
        self._kernels.write_windows(keys, values, self._tiles, layer)
        scale = queries.shape[-1] ** -0.5 if scaling is None else scaling
        sizes = keys.shape[1], values.shape[2]
        return self._kernels.window_attention(queries, self._tiles, layer, *sizes, scale).flatten(1)


@dataclass(frozen=True, slots=True)
class WindowRows:
    """What the host says of a pass: the pieces of its rows, one after another."""

    pieces: Sequence[WindowPiece]
    positions: Sequence[int]
    """The position of each token."""
    tokens: Sequence[int]
    """What the pass embeds: at most as many as it has tokens."""
    wanted: Sequence[int]
    """The tokens whose outputs are wanted, by index."""


class WindowBuffers:
    """The inputs of the passes of one size, at fixed addresses, as a CUDA graph reads them.

    Behind the pass's own tokens and tiles there is padding. Its keys and values are stored in a slot of its own, and it
    attends to nothing, so what is computed for it has no meaning.
    """

    def __init__(
        self,
        size: DraftingSize,
        windows: WindowAttention,
        sizes: tuple[int, int, int],
        larger: WindowBuffers | None = None,
    ) -> None:
        """`sizes`: layers, slots that a token may see, and numbers of a feature.

        The memory of `larger` serves this size, too. Raises `ValueError` for attention without kernels.
        """
        if windows.kernels is None:
            raise ValueError("attention that reads one piece after another has no fixed addresses")
        layers, slots, width = sizes
        heads, device = windows.heads, windows.device
        self.size, self._heads, self._device = size, heads, device
        self._most_words = size.tokens * -(-slots // 8)
        """Numbers of 64 bits for masks."""
        if larger is not None and (larger._most_words < self._most_words or larger.size.rows < size.rows):
            larger = None
        self._padding = torch.zeros(layers, heads.kv_heads, 1, heads.width, device=device)
        arrays = self._planned(WindowRows((), (), (), ()))
        arrays[-1] = np.zeros(self._most_words, dtype=np.int64)
        words = words_together(arrays)
        self._numbers: Tensor = (
            torch.zeros(words, dtype=torch.int64, device=device) if larger is None else larger._numbers
        )
        self.tokens, self.wanted, positions, table, items, queries, places, arrivals, masks = split_together(
            self._numbers, arrays
        )
        """int64 `[tokens]` each; see `WindowRows`. Padding wants the first output."""
        features = torch.zeros(size.tokens, width, device=device) if larger is None else larger.features
        self.features: Tensor = features[: size.tokens]
        """float32 `[tokens, width]`: what each token reads beside the token."""
        tiles = WindowTiles(
            *(table, items, queries, places, masks.view(torch.uint8), arrivals),
            *(_tile_of(heads), size.tokens, MOST_SPLITS),
        )
        self.step: WindowStep = TiledWindows(windows.kernels, (), tiles, positions)

    def fill(self, rows: WindowRows) -> bool:
        """Copy what the host says of a pass that fits into the buffers, in one piece. The host does not wait.

        Returns `False` for windows that are too long: nothing is copied then.
        """
        arrays = self._planned(rows)
        if len(arrays[-1]) > self._most_words:
            return False
        whole = joined(arrays, self._device)
        # torch does not reuse pinned memory before the copy has finished.
        self._numbers[: len(whole)].copy_(whole, non_blocking=True)
        return True

    def _planned(self, rows: WindowRows) -> list[StepArray]:
        """The arrays of a pass, padded. The last one, the masks, is only as long as they are."""
        size, tile, padding = self.size, _tile_of(self._heads), self._padding
        tiles = (size.tokens + (tile - 1) * size.rows) // tile
        address, (layer, head) = address_of(padding), padding.stride()[:2]
        positions, table, items, queries, places, _, masks = plan_tiles(rows.pieces, rows.positions, self._heads).arrays
        return [
            _padded(np.array(rows.tokens, dtype=np.int64), size.tokens, 0),
            _padded(np.array(rows.wanted, dtype=np.int64), size.tokens, 0),
            _padded(positions, size.tokens, 0),
            _padded(table, size.rows + 1, (address, address, layer, head, 0, 1, -1, 0, 0)),
            _padded(items, tiles, (size.rows, 0, 0)),
            _padded(queries, size.tokens, 0),
            _padded(places, size.tokens, (size.rows, 0)),
            np.zeros(tiles * self._heads.kv_heads, dtype=np.int32),
            masks,
        ]


def _padded(array: StepArray, rows: int, padding: int | Sequence[int]) -> StepArray:
    """The array with as many rows, `padding` behind its own."""
    found = np.empty((rows, *np.shape(padding)), dtype=array.dtype)
    found[:] = padding
    if len(array):
        found[: len(array)] = array
    return found


def _tile_of(heads: WindowHeads) -> int:
    return window_tile(heads.heads // heads.kv_heads, heads.width)


def plan_tiles(
    pieces: Sequence[WindowPiece], positions: Sequence[int], heads: WindowHeads
) -> PackedPlan[tuple[Tensor, WindowTiles]]:
    """The positions and the tiles of a pass as arrays on the host."""
    tile = _tile_of(heads)
    firsts = np.cumsum([0, *(piece.count for piece in pieces)])
    table, items, tokens, masks = [], [], list[int](), list[npt.NDArray[np.uint8]]()
    splits = split_queries = mask_bytes = 0
    order = sorted(range(len(pieces)), key=lambda index: pieces[index].count > _MOST_SPLIT_TOKENS)
    for index in order:
        piece, first = pieces[index], int(firsts[index])
        begins = range(0, piece.count, tile)
        items += [(index, len(tokens) + begin, min(tile, piece.count - begin)) for begin in begins]
        tokens += range(first, first + piece.count)
        if piece.count <= _MOST_SPLIT_TOKENS:
            split_queries = len(tokens)
    for piece, first in zip(pieces, firsts.tolist(), strict=False):
        split = split_of(piece)
        splits = max(splits, -(-piece.end // split))
        mask, begin, stride = piece.is_seen, -1, 0
        if mask is not None:
            begin, stride = mask_bytes, mask.shape[1] if mask.dim() == 2 else 0
            masks.append(bytes_of(mask))
            mask_bytes += mask.numel()
        layer, head = piece.keys.stride()[:2]
        table.append(
            (address_of(piece.keys), address_of(piece.values), layer, head, piece.end, split, begin, stride, first)
        )
    masks.append(np.zeros(-mask_bytes % 8, dtype=np.uint8))
    slots = [(index, piece.slot + own) for index, piece in enumerate(pieces) for own in range(piece.count)]
    arrays: list[StepArray] = [
        np.array(positions, dtype=np.int64),
        np.array(table, dtype=np.int64),
        np.array(items, dtype=np.int32),
        np.array(tokens, dtype=np.int32),
        np.array(slots, dtype=np.int32),
        np.zeros(len(items) * heads.kv_heads, dtype=np.int32),
        np.concatenate(masks).view(np.int64),
    ]

    def metadata(sent: Sequence[Tensor]) -> tuple[Tensor, WindowTiles]:
        places, own, found, of_query, written, arrivals, seen = sent
        seen = seen.view(torch.uint8)
        return places, WindowTiles(own, found, of_query, written, seen, arrivals, tile, split_queries, splits)

    return PackedPlan(arrays, metadata)


def split_of(piece: WindowPiece) -> int:
    """Slots of a split of a piece: a choice that depends on the piece alone."""
    if piece.count > _MOST_SPLIT_TOKENS:
        return piece.end
    return max(SPLIT_KEYS, -(-piece.end // (MOST_SPLITS * _UNIT)) * _UNIT)


def bytes_of(mask: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a mask, one for each number."""
    return mask.numpy().view(np.uint8).ravel()


def address_of(tensor: Tensor) -> int:
    """Where a tensor's numbers are."""
    return tensor.data_ptr()


@lru_cache
def kernels_for(heads: WindowHeads, device: torch.device) -> WindowKernels | None:
    """The kernels on a GPU, if they agree with torch there. Logs why they are not used.

    They are tried once for the same heads, since a module that learns is packed again with each of its weights.
    """
    if device.type != "cuda":
        return None
    try:
        from workers.forward.triton import windows

        difference = trial_difference(windows, heads, device)
    except Exception as error:  # a compiler may raise anything
        logger.warning("drafting modules attend one row after another: %r", error)
        return None
    if not difference < _TRIAL_TOLERANCE:
        logger.warning("drafting modules attend one row after another: the kernels differ by %.1e", difference)
        return None
    return windows


@torch.inference_mode()
def trial_difference(kernels: WindowKernels, heads: WindowHeads, device: torch.device) -> float:
    """The largest difference of the kernels' attention from that by torch, for few and many tokens, with and without
    masks and splits, and of what they store in all layers."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    pieces: list[WindowPiece] = []
    for slot, count, is_masked in ((2 * SPLIT_KEYS - 3, 5, True), (40, _MOST_SPLIT_TOKENS + 1, True), (0, 1, False)):
        seen = torch.rand((count, slot + count), generator=generator) < 0.5
        seen[:, slot:] |= torch.eye(count, dtype=torch.bool)
        keys, values = (drawn(2, heads.kv_heads, slot + count + 2, heads.width).to(device) for _ in range(2))
        pieces.append(WindowPiece(keys, values, slot, count, seen if is_masked else None))
    tokens = sum(piece.count for piece in pieces)
    queries, keys = (drawn(tokens, count, heads.width).to(device) for count in (heads.heads, heads.kv_heads))
    fresh = drawn(tokens, heads.kv_heads, heads.value_width).to(device)
    planned = plan_tiles(pieces, range(tokens), heads)
    positions, tiles = planned.metadata(to_device_together(planned.arrays, device))
    tiled, looped = TiledWindows(kernels, pieces, tiles, positions), LoopedWindows(pieces, positions, device)
    found = tiled.attend(1, queries, keys, fresh)
    difference = (found - looped.attend(1, queries, keys, fresh)).abs().max()
    both = keys.expand(2, *keys.shape), queries[:, : heads.kv_heads].expand(2, -1, -1, -1)
    kernels.write_layers(*both, tiles)
    for piece, part in zip(pieces, torch.split(keys, [piece.count for piece in pieces]), strict=True):
        stored = piece.keys[:, :, piece.slot : piece.end] - part.transpose(0, 1)
        difference = torch.maximum(difference, stored.abs().max())
    return float(difference)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, is_seen: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of one piece: queries [tokens, heads, width] → [tokens, heads × value width].

    `keys` and `values` are [KV heads, slots, width]. `is_seen`, bool, is [slots] or [tokens, slots]; `None` if
    everything is seen. Every token must see something.
    """
    tokens, heads, width = queries.shape
    group = heads // len(keys)
    folded = queries.reshape(tokens, len(keys), group * width).transpose(0, 1)  # [KV heads, tokens, group × width]
    folded = folded.reshape(1, len(keys), tokens * group, width)
    if is_seen is not None and is_seen.dim() == 2:
        is_seen = is_seen.repeat_interleave(group, dim=0)
    mask = None if is_seen is None else is_seen.expand(1, 1, tokens * group, -1)
    found = functional.scaled_dot_product_attention(
        folded, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=scaling
    )
    return found.view(len(keys), tokens, -1).transpose(0, 1).reshape(tokens, -1)
