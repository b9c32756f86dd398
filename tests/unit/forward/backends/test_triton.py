"""What the Triton backend plans of a step, computed without Triton, is what the reference computes."""

from __future__ import annotations

import torch

from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout
from cluster.core.tree import TokenTree
from tests.support.engines.packed_reference import PackedReference
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
