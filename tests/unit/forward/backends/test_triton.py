"""What the Triton backend plans of a step, computed without Triton, is what the reference computes."""

from __future__ import annotations

import pytest
import torch

from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.engines.packed_reference import PackedReference
from workers.forward.backends import triton
from workers.forward.backends.base import AttentionSetting
from workers.forward.backends.sdpa import SdpaBackend
from workers.forward.layout import RowShape
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.spec import LayerShape
from workers.kv.store import KvStore

SIZE, LAYER = 16, LayerShape(1, 16)
CHAIN = TokenTree.chain(range(24))
BRANCHES = TokenTree(tuple(range(25)), (-1, -1, *range(1, 24)))


def test_nodes_deeper_than_the_window_see_those_of_their_ancestors_that_are_sinks() -> None:
    """A text that is shorter than the sinks, so that nodes are among them."""
    window, draw = AttentionWindow(16, sinks=8), torch.Generator().manual_seed(0)
    groups = KvCacheGroups(KvLayout(SIZE), (LayerPlacement(0, 0, window),), (LAYER,))
    keys, values = (torch.randn((5, SIZE, 1, LAYER.head_dim), generator=draw) for _ in range(2))
    setting = AttentionSetting(KvStore(groups, [keys], [values]), (LAYER,), 4, torch.float32, torch.device("cpu"))
    rows = [
        RowShape([[BlockId(2), BlockId(0)]], 1, 1, CHAIN),
        RowShape([[BlockId(1), BlockId(3)]], 2, 1, BRANCHES),
    ]
    queries = torch.randn((sum(row.width for row in rows), 1, LAYER.head_dim), generator=draw)
    found, expected = (
        backend.attend(0, queries, backend.plan(rows), None)  # type: ignore[attr-defined]
        for backend in (PackedReference(setting), SdpaBackend(setting))
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_beside_a_long_row_the_sums_of_splits_take_a_bounded_memory() -> None:
    """One row of 131,000 tokens has 256 splits. As many for each query of the others would take 2 GB."""
    full, window = AttentionWindow(), AttentionWindow(128)
    layer = LayerShape(8, 128, heads_per_kv=4)
    groups = KvCacheGroups(KvLayout(SIZE), (LayerPlacement(0, 0, full), LayerPlacement(0, 0, window)), (layer,))
    setting = AttentionSetting(KvStore(groups, [], []), (layer, layer), 9000, torch.bfloat16, torch.device("cpu"))
    drafted = TokenTree.chain(range(7))
    rows = [RowShape([range(8)], 100, 1, drafted) for _ in range(63)]
    rows[40:40] = [RowShape([range(8200)], 131_000, 1, drafted), RowShape([range(8200)], 60_000, 1, drafted)]
    rows.append(RowShape([range(10)], 0, 100, EMPTY_TREE))
    plan = PackedReference(setting).plan(rows)
    tokens = sum(row.width for row in rows)
    for queries in plan.queries.values():
        narrow = [one for one in queries if not one.is_wide]
        assert sorted(token for one in queries for token in one.tokens.tolist()) == list(range(tokens))
        assert max(one.splits * len(one.tokens) for one in narrow) * 32 * (128 + 2) * 4 <= triton._MOST_SUMS
        assert len(narrow) == 2
    assert [one.splits for one in plan.queries[full]] == [256, 1, 1]
    assert [one.splits for one in plan.queries[window]] == [3, 3, 1]


def test_rows_in_several_launches_are_what_the_reference_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_MOST_SUMS", 1)
    placements, draw = (LayerPlacement(0, 0, AttentionWindow()),), torch.Generator().manual_seed(0)
    groups = KvCacheGroups(KvLayout(SIZE), placements, (LAYER,))
    keys, values = (torch.randn((120, SIZE, 1, LAYER.head_dim), generator=draw) for _ in range(2))
    setting = AttentionSetting(KvStore(groups, [keys], [values]), (LAYER,), 119, torch.float32, torch.device("cpu"))
    rows, free = [], iter(range(119))
    for stored in (40, 1100, 0, 600):
        held = [BlockId(next(free)) for _ in range(-(-(stored + 3) // SIZE))]
        rows.append(RowShape([held], stored, 1, TokenTree.chain((1, 2))))
    queries = torch.randn((sum(row.width for row in rows), 1, LAYER.head_dim), generator=draw)
    backend, reference = PackedReference(setting), SdpaBackend(setting)
    plan = backend.plan(rows)
    (parts,) = plan.queries.values()
    assert [one.tokens.tolist() for one in parts] == [[3, 4, 5], [9, 10, 11], [0, 1, 2], [6, 7, 8]]
    expected = reference.attend(0, queries, reference.plan(rows), None)
    torch.testing.assert_close(backend.attend(0, queries, plan, None), expected, atol=1e-5, rtol=1e-5)
