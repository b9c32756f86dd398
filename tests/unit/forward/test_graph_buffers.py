"""A step in the fixed-size buffers of a graph: every token attends to the same positions as without buffers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from cluster.core.ids import BlockId
from cluster.core.kv import KvGroup, KvLayout
from cluster.core.tree import TokenTree
from tests.support.engines.graph_replay import BLOCK, CPU, WINDOW
from workers.forward.backends.base import AttentionSetting
from workers.forward.backends.flex import FlexBackend, FlexStep
from workers.forward.backends.sdpa import SdpaBackend
from workers.forward.gathered_step import GatheredStep, gather_rows
from workers.forward.graph_buffers import GraphBuffers
from workers.forward.graph_sizes import GraphSize
from workers.forward.layout import RowShape
from workers.kv.block_table import OUT_OF_WINDOW
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.spec import LayerShape
from workers.kv.store import KvStore

WINDOWS = (AttentionWindow(), AttentionWindow(WINDOW), AttentionWindow(WINDOW, sinks=3), AttentionWindow(70))


@st.composite
def trees(draw: st.DrawFn, most: int) -> TokenTree:
    count = draw(st.integers(0, most))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
    return TokenTree(tuple(range(count)), parents)  # all tokens differ, so no two siblings are equal


@st.composite
def steps(draw: st.DrawFn, most_width: int = 24) -> list[RowShape]:
    """Rows with separate blocks in two tables. The second table has freed the blocks outside its window."""
    rows: list[RowShape] = []
    block = 0
    for _ in range(draw(st.integers(1, 4))):
        stored, fresh = draw(st.integers(0, 40)), draw(st.integers(1, most_width // 2))
        tree = draw(trees(most_width // 2))
        held = -(-(stored + fresh + len(tree)) // BLOCK)
        whole, windowed = range(block, block + held), list(range(block + held, block + 2 * held))
        for index in range(-(-3 // BLOCK), max(0, stored - WINDOW + 1) // BLOCK):
            windowed[index] = OUT_OF_WINDOW
        rows.append(RowShape([whole, windowed], stored, fresh, tree))
        block += 2 * held
    return rows


def kv_groups(window: AttentionWindow) -> KvCacheGroups:
    layout = KvLayout(BLOCK, (KvGroup(), KvGroup(window=WINDOW, sinks=3)))
    groups = (LayerPlacement(0, 0, window), LayerPlacement(1, 0, AttentionWindow(WINDOW, 3)))
    return KvCacheGroups(layout, groups, (LayerShape(1, 8),))


def seen_slots(layout: GatheredStep, place: LayerPlacement, tokens: int) -> dict[int, set[int]]:
    """From each token of the step to the slots that it attends to in one layer."""
    found: dict[int, set[int]] = {}
    for group in layout.groups:
        blocks = group.blocks[place.table, place.window]
        slots = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)  # [rows, keys]
        mask = group.masks[place.window]
        targets = range(tokens) if len(layout.groups) == 1 else group.targets.tolist()
        for target, flat in zip(targets, group.padding.scatter.tolist()[: len(targets)], strict=True):
            row, query = divmod(flat, group.padding.gather.shape[1])
            assert group.padding.gather[row, query] == target
            seen = slots[row][mask[row, query]].tolist()
            assert len(seen) == len(set(seen))
            found[target] = set(seen)
    return found


def visited_slots(step: FlexStep, place: LayerPlacement, tokens: int) -> dict[int, set[int]]:
    """For each token, the attended slots within the blocks that FlexAttention visits."""
    view = step.views[place.table, place.window]
    found: dict[int, set[int]] = {}
    for token, flat in enumerate(step.padding.scatter.tolist()[:tokens]):
        row, query = divmod(flat, step.padding.gather.shape[1])
        visited = view.blocks[row, : view.counts[row]].tolist()
        assert len(visited) == len(set(visited))
        slots = torch.arange(view.starts.shape[1] * BLOCK)
        folded = query + 2 * step.padding.gather.shape[1]  # for the third head that shares the keys
        seen = slots[view.is_seen(torch.tensor(row), torch.tensor(0), torch.tensor(folded), slots)].tolist()
        found[token] = {slot for slot in seen if slot // BLOCK in visited}
        assert found[token] == set(seen)
    return found


def distances(layout: GatheredStep, window: AttentionWindow, rows: list[RowShape]) -> list[list[int]]:
    """For each token of the step, the relative positions of the keys that it sees, in order."""
    found: dict[int, list[int]] = {}
    tokens = sum(row.width for row in rows)
    for group in layout.groups:
        targets = range(tokens) if len(layout.groups) == 1 else group.targets.tolist()
        for target, flat in zip(targets, group.padding.scatter.tolist()[: len(targets)], strict=True):
            row, query = divmod(flat, group.padding.gather.shape[1])
            found[target] = group.relative[window][row, query][group.masks[window][row, query]].tolist()
    return [found[token] for token in range(tokens)]


@settings(max_examples=40, deadline=None)
@given(steps(), st.sampled_from(WINDOWS))
def test_relative_positions_count_tree_nodes_by_their_depth(rows: list[RowShape], window: AttentionWindow) -> None:
    groups = kv_groups(window)
    layer = LayerShape(1, 8, alibi_slopes=(0.5,))
    backend = SdpaBackend(AttentionSetting(KvStore(groups, [], []), (layer,) * 2, 300, torch.float32, CPU))
    frame = GraphBuffers(GraphSize(4, 32, 128, 32, 4), groups, BlockId(300), CPU)
    count = sum(row.width for row in rows)
    frame.fill(rows, range(count), [position for row in rows for position in row.positions()], [count - 1])
    expected = []
    for row in rows:
        for token, position in enumerate(row.positions()):
            node = token - row.fresh
            path = row.tree.path(node) if node >= 0 else ()
            own = [row.base_len + depth - 1 for depth in sorted(row.tree.depths()[other] for other in path)]
            seen = [*range(min(position + 1, row.base_len)), *own]
            expected.append([key - position for key in seen if window.sees(position, key)])
    assert distances(backend.plan(rows), window, rows) == expected
    assert distances(backend.plan_padded(frame.step()), window, rows) == expected


@settings(max_examples=40, deadline=None)
@given(steps(), steps(), st.sampled_from(WINDOWS))
def test_a_token_attends_to_the_same_slots_with_and_without_a_frame(
    first: list[RowShape], second: list[RowShape], window: AttentionWindow
) -> None:
    groups = kv_groups(window)
    scratch = BlockId(300)
    frame = GraphBuffers(GraphSize(4, 32, 128, 32, 4), groups, scratch, CPU)
    setting = AttentionSetting(KvStore(groups, [], []), groups.block_layers, 300, torch.float32, CPU)
    gathering, visiting = SdpaBackend(setting), FlexBackend(setting, flex_attention)
    for rows in (first, second):  # the data of the first step does not affect the second
        count = sum(row.width for row in rows)
        positions = [position for row in rows for position in row.positions()]
        frame.fill(rows, range(count), positions, [count - 1])
        here, there = gathering.plan_padded(frame.step()), gather_rows(rows, groups, CPU)
        for place in groups.placements:
            assert seen_slots(here, place, count) == seen_slots(there, place, count)
        for place in groups.placements:
            assert visited_slots(visiting.plan_padded(frame.step()), place, count) == seen_slots(there, place, count)
        assert torch.equal(here.slots[:, :count], there.slots)
        assert (here.slots[:, count:] // BLOCK == scratch).all()
        assert (here.groups[0].blocks[0, window][len(rows) :] == scratch).all()
        assert all(mask.any(dim=-1).all() for mask in here.groups[0].masks.values())  # no softmax over an empty set
