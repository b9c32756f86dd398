"""Blocks that a sequence needs: windows free what no later token attends to, and bounds hold at every length."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.errors import InvalidRequest
from cluster.core.kv import KvGroup, KvLayout

quick = settings(max_examples=60, deadline=None)
groups = st.builds(KvGroup, tables=st.integers(1, 4)) | st.builds(
    KvGroup, tables=st.integers(1, 4), window=st.integers(2, 30), sinks=st.integers(0, 12)
)
layouts = st.builds(KvLayout, st.sampled_from([1, 2, 4, 16]), st.lists(groups, min_size=1, max_size=3).map(tuple))


def seen(group: KvGroup, stored_len: int, end: int) -> set[int]:
    """Positions below `end` that a later token attends to or that are still written."""
    first = 0 if group.window is None else max(0, stored_len - group.window + 1)
    return set(range(first, end)) | set(range(min(group.sinks, end)))


# --- blocks held -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored_len", "end", "blocks"), [(0, 0, 0), (0, 1, 1), (4, 4, 1), (4, 5, 2), (17, 17, 5), (17, 21, 6)]
)
def test_full_attention_keeps_all_blocks(stored_len: int, end: int, blocks: int) -> None:
    assert KvLayout(4).held(stored_len, end) == blocks


def test_blocks_wholly_before_a_window_are_freed() -> None:
    sliding = KvLayout(4, (KvGroup(window=8),))
    assert [sliding.held(length) for length in (8, 10, 11, 12, 14, 15, 100)] == [2, 3, 2, 2, 3, 2, 2]


def test_a_window_includes_the_newest_token() -> None:
    group = KvGroup(window=8)
    assert [group.first_needed(length) for length in (0, 7, 8, 20)] == [0, 0, 1, 13]


def test_sinks_stay_beside_the_window_and_count_once_while_they_overlap() -> None:
    sinking = KvLayout(4, (KvGroup(window=8, sinks=5),))
    assert [sinking.held(length) for length in (4, 8, 16, 40)] == [1, 2, 4, 4]


def test_every_table_of_every_group_has_its_own_blocks() -> None:
    layout = KvLayout(4, (KvGroup(tables=2), KvGroup(tables=5, window=8)))
    assert layout.tables == 7
    assert layout.held(40) == 2 * 10 + 5 * 2
    assert layout.held(0, 4) == 7


@quick
@given(layout=layouts, stored_len=st.integers(0, 120), more=st.integers(0, 40))
def test_exactly_the_blocks_with_a_needed_position_are_held(layout: KvLayout, stored_len: int, more: int) -> None:
    end = stored_len + more
    naive = sum(
        group.tables * len({position // layout.block_size for position in seen(group, stored_len, end)})
        for group in layout.groups
    )
    assert layout.held(stored_len, end) == naive


# --- longest lengths ---------------------------------------------------------------------


@quick
@given(layout=layouts, stored_len=st.integers(0, 120), more=st.integers(0, 40), free=st.integers(0, 60))
def test_the_longest_length_uses_exactly_the_free_blocks(
    layout: KvLayout, stored_len: int, more: int, free: int
) -> None:
    end = stored_len + more
    longest = layout.max_length(end, free)
    assert layout.held(stored_len, longest) - layout.held(stored_len, end) <= free
    assert layout.held(stored_len, longest + 1) - layout.held(stored_len, end) > free


@quick
@given(layout=layouts, stored_len=st.integers(0, 120), more=st.integers(0, 40), added=st.integers(0, 40))
def test_more_positions_take_the_blocks_that_are_then_held_in_addition(
    layout: KvLayout, stored_len: int, more: int, added: int
) -> None:
    end = stored_len + more
    assert layout.added(end, added) == layout.held(stored_len, end + added) - layout.held(stored_len, end)


@quick
@given(layout=layouts, length=st.integers(1, 150), steps=st.lists(st.integers(1, 32), min_size=1), most=st.just(32))
def test_a_sequence_never_holds_more_blocks_than_its_peak(
    layout: KvLayout, length: int, steps: list[int], most: int
) -> None:
    peak, stored_len, step = layout.peak(length, most), 0, 0
    while stored_len < length:
        end = min(length, stored_len + steps[step % len(steps)])
        assert layout.held(stored_len, end) <= peak
        stored_len, step = end, step + 1


@quick
@given(layout=layouts, blocks=st.integers(0, 80), most=st.integers(1, 200), step_tokens=st.integers(1, 32))
def test_the_longest_sequence_fits_and_one_token_more_does_not(
    layout: KvLayout, blocks: int, most: int, step_tokens: int
) -> None:
    longest = layout.longest(blocks, step_tokens, most)
    assert 0 <= longest <= most
    assert longest == 0 or layout.peak(longest, step_tokens) <= blocks
    assert longest == most or layout.peak(longest + 1, step_tokens) > blocks


def test_a_pool_that_holds_all_windows_bounds_no_length() -> None:
    sliding = KvLayout(16, (KvGroup(window=512),))
    assert sliding.longest(sliding.peak(10_000, 256), 256, 1 << 20) == 1 << 20


# --- bounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tables": 0}, "tables"),
        ({"window": 0}, "window"),
        ({"window": 1}, "window"),
        ({"sinks": 1}, "sinks"),
        ({"window": 8, "sinks": -1}, "sinks"),
    ],
)
def test_counts_out_of_bounds_are_refused(values: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        KvGroup(**values)
    assert refusal.value.field == field
