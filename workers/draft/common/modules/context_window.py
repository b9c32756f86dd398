"""The keys, values and features of the last positions of one sequence. Any position may be unknown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.forward.native.window_layers import WindowPiece

BooleanArray = npt.NDArray[np.bool_]

WHOLE_TEXT = 1 << 20
"""The window of modules that attend to the whole text."""
_SLACK = 128
"""Positions beyond the window before older ones are dropped."""
_LEAST = 64


@dataclass(frozen=True, slots=True)
class ContextShape:
    """What a module keeps of each position."""

    layers: int
    kv_heads: int
    head_width: int
    feature_size: int
    """Width of the feature vector."""
    window: int
    """Most positions before a token that it attends to."""
    scratch: int
    """Most positions after the committed ones that are written while drafting."""


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Keys and values [layers, KV heads, positions, head width], and features [positions, feature size]."""

    keys: Tensor
    values: Tensor
    features: Tensor

    def part(self, first: int, end: int) -> ContextRows:
        """A view of consecutive positions, by index."""
        return ContextRows(self.keys[:, :, first:end], self.values[:, :, first:end], self.features[first:end])

    def copied(self, dtype: torch.dtype) -> ContextRows:
        """A copy in another type."""
        keys, values, features = (
            part.to(dtype, copy=True, memory_format=torch.contiguous_format)
            for part in (self.keys, self.values, self.features)
        )
        return ContextRows(keys, values, features)


class ContextWindow:
    """Slots for consecutive positions. At least the last `window` of them stay; older ones are dropped."""

    def __init__(self, shape: ContextShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._most = shape.window + _SLACK + shape.scratch
        self._rows = self._empty(0)
        self._known = np.zeros(0, dtype=np.bool_)
        self._origin = 0
        """Position of the first slot."""

    def is_known(self, first: int, end: int) -> bool:
        """Whether all positions from `first` to `end - 1` are known."""
        first, end = first - self._origin, end - self._origin
        return first >= 0 and end <= len(self._known) and bool(self._known[first:end].all())

    @property
    def oldest(self) -> int:
        """The first position that can be stored; 0 as long as nothing is known."""
        return self._origin if self._known.any() else 0

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on. Then there is room for the window of the last token again."""
        self._known[max(0, length - self._origin) :] = False
        first = max(0, length - 1 - self._shape.window)
        if first < self._origin and self._known.any():
            end = self._origin + len(np.trim_zeros(self._known, "b"))
            rows, known, begin = self._rows, self._known, self._origin
            self._rows, self._known, self._origin = self._empty(0), np.zeros(0, dtype=np.bool_), first
            self._move(first, end - first)
            self._write(begin - first, end - first, rows.part(0, end - begin))
            self._known[begin - first :] = known[: end - begin]

    def store(self, first: int, rows: ContextRows) -> None:
        """Store consecutive positions, `first` the position of the first one."""
        end = first + len(rows.features)
        self._reserve(first, end)
        skipped = max(0, self._origin - first)
        slot, last = first + skipped - self._origin, end - self._origin
        if last <= slot:
            return
        self._write(slot, last, rows.part(skipped, end - first))
        self._known[slot:last] = True

    def receives(self, first: int, count: int) -> bool:
        """Whether all of so many positions from `first` on have a place in the window."""
        return first >= self.oldest and count <= self._shape.window

    def receive(self, first: int, count: int) -> tuple[WindowPiece, Tensor]:
        """Slots for positions that `receives` accepts, and views of their features. The caller writes them at once.

        They are known from now on.
        """
        self._reserve(first, first + count)
        slot, rows = first - self._origin, self._rows
        self._known[slot : slot + count] = True
        return WindowPiece(rows.keys, rows.values, slot, count, None), rows.features[slot : slot + count]

    def stored(self, first: int, end: int) -> ContextRows:
        """Views of positions that are known."""
        return self._rows.part(first - self._origin, end - self._origin)

    def feature(self, position: int) -> Tensor | None:
        """The feature [feature size] of a position, if it is known."""
        return self._rows.features[position - self._origin] if self.is_known(position, position + 1) else None

    def scratch(self, position: int, count: int) -> tuple[Tensor, Tensor, int]:
        """Keys and values [layers, KV heads, slots, head width] of the window before `position` and `count` slots more.

        The third value is the index of the first of these slots, which the caller may write. They are not known
        afterwards.
        """
        self._reserve(position, position + count)
        self._known[position - self._origin :] = False
        first = max(0, position - self._shape.window - self._origin)
        begin = position - self._origin
        part = slice(first, begin + count)
        return self._rows.keys[:, :, part], self._rows.values[:, :, part], begin - first

    def known_before(self, position: int) -> BooleanArray:
        """Which slots of `scratch` before `position` are known."""
        return self._known[max(0, position - self._shape.window - self._origin) : position - self._origin]

    def mark(self, first: int, end: int) -> None:
        """Mark positions as known, whose slots of `scratch` were written."""
        self._known[first - self._origin : end - self._origin] = True

    def block(self, position: int, count: int) -> WindowPiece:
        """The `count` positions from `position` on, which attend to each other and to all known slots before them."""
        keys, values, begin = self.scratch(position, count)
        flags = self.known_before(position)
        is_seen = None
        if not flags.all():
            is_seen = torch.from_numpy(np.concatenate([flags, np.ones(count, dtype=np.bool_)]))
        return WindowPiece(keys, values, begin, count, is_seen)

    def _reserve(self, first: int, end: int) -> None:
        """Make slots up to position `end - 1`: shift older positions out, or grow."""
        if not self._known.any():  # begin anywhere
            self._origin = max(0, min(first, end - self._shape.scratch - self._shape.window))
        if end - self._origin <= len(self._known):
            return
        if end - self._origin > self._most:
            origin = end - self._shape.window - self._shape.scratch
            self._move(origin, max(len(self._known), end - origin))
        if end - self._origin > len(self._known):
            size = max(_LEAST, 1 << (end - self._origin - 1).bit_length())
            self._move(self._origin, min(self._most, size))

    def _move(self, origin: int, size: int) -> None:
        """Copy what is stored from position `origin` on into new slots."""
        rows, known = self._empty(size), np.zeros(size, dtype=np.bool_)
        first = min(origin - self._origin, len(self._known))
        kept = min(len(self._known) - first, size)
        old, self._rows = self._rows, rows
        self._write(0, kept, old.part(first, first + kept))
        known[:kept] = self._known[first : first + kept]
        self._known, self._origin = known, origin

    def _write(self, first: int, end: int, rows: ContextRows) -> None:
        mine = self._rows.part(first, end)
        mine.keys.copy_(rows.keys)
        mine.values.copy_(rows.values)
        mine.features.copy_(rows.features)

    def _empty(self, size: int) -> ContextRows:
        shape, device = self._shape, self._device
        keys = torch.zeros(shape.layers, shape.kv_heads, size, shape.head_width, device=device)
        return ContextRows(keys, torch.zeros_like(keys), torch.zeros(size, shape.feature_size, device=device))
