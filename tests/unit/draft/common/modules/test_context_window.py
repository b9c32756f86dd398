"""The window stores the last positions of a sequence, known or not, in any order of arrival."""

from __future__ import annotations

import random

import torch

from workers.draft.common.modules.context_window import ContextRows, ContextShape, ContextWindow

SHAPE = ContextShape(layers=2, kv_heads=1, head_width=2, feature_size=3, window=16, scratch=4)


def rows(first: int, end: int) -> ContextRows:
    """Rows whose values tell their position."""
    positions = torch.arange(first, end).float()
    pair = positions.view(1, 1, -1, 1).expand(2, 1, -1, 2)
    return ContextRows(pair, -pair, positions.view(-1, 1).expand(-1, 3))


def window() -> ContextWindow:
    return ContextWindow(SHAPE, torch.device("cpu"))


def visible(stored: ContextWindow, position: int) -> list[int]:
    """The positions that a block at `position` attends to, besides its own."""
    piece = stored.block(position, SHAPE.scratch)
    keys, values, begin, seen = piece.keys, piece.values, piece.slot, piece.is_seen
    assert keys.shape[2] == values.shape[2] == begin + SHAPE.scratch
    assert seen is None or bool(seen[begin:].all())
    found = [int(key) for index, key in enumerate(keys[1, 0, :begin, 0]) if seen is None or seen[index]]
    assert [-int(value) for value in values[0, 0, :begin, 1]][-len(found) :] == found or seen is not None
    return found


def test_everything_within_the_window_is_visible_however_long_the_text_is() -> None:
    stored, length = window(), 0
    draw = random.Random(0)
    while length < 2000:
        count = draw.randrange(1, 40)
        stored.store(length, rows(length, length + count))
        length += count
        assert visible(stored, length) == [*range(max(0, length - SHAPE.window), length)]
        feature = stored.feature(length - 1)
        assert feature is not None and feature.tolist() == [length - 1] * 3


def test_unknown_positions_are_not_visible() -> None:
    stored = window()
    stored.store(2, rows(2, 4))
    stored.store(7, rows(7, 9))
    assert visible(stored, 10) == [2, 3, 7, 8]
    assert stored.feature(5) is None and stored.feature(9) is None
    stored.store(4, rows(4, 7))
    assert visible(stored, 9) == [*range(2, 9)]


def test_nothing_is_visible_before_anything_is_known() -> None:
    assert visible(window(), 700) == []
    assert window().feature(3) is None


def test_a_jump_beyond_the_window_drops_what_was_known() -> None:
    stored = window()
    stored.store(0, rows(0, 10))
    stored.store(5000, rows(5000, 5003))
    assert visible(stored, 5003) == [5000, 5001, 5002]
    assert not stored.is_known(0, 1)


def test_a_cut_forgets_later_positions_only() -> None:
    stored = window()
    stored.store(0, rows(0, 12))
    stored.truncate(5)
    assert visible(stored, 5) == [0, 1, 2, 3, 4]
    assert not stored.is_known(5, 6)
    stored.store(0, rows(0, 300))
    stored.truncate(3)  # before the oldest stored position
    assert visible(stored, 3) == []
    stored.store(3, rows(3, 5))
    assert visible(stored, 5) == [3, 4]


def test_after_a_cut_there_is_room_for_the_whole_window_again() -> None:
    stored = window()
    stored.store(0, rows(0, 300))
    oldest = stored.oldest
    stored.truncate(oldest + 5)
    assert visible(stored, oldest + 5) == [*range(oldest, oldest + 5)]
    stored.store(oldest - 8, rows(oldest - 8, oldest + 2))
    assert visible(stored, oldest + 5) == [*range(oldest - 8, oldest + 5)]


def test_positions_before_the_oldest_stored_one_are_ignored() -> None:
    stored = window()
    stored.store(0, rows(0, 400))
    stored.store(0, rows(0, 8))
    assert visible(stored, 400) == [*range(384, 400)]


def test_what_a_draft_writes_is_not_known_afterwards() -> None:
    stored = window()
    stored.store(0, rows(0, 6))
    keys, values, begin = stored.scratch(6, 4)
    keys[:, :, begin:], values[:, :, begin:] = 99.0, 99.0
    assert visible(stored, 8) == [0, 1, 2, 3, 4, 5]
