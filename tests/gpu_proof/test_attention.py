"""The attention kernels, interpreted or on a GPU: equal to the reference for every row, and free of neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.gpu_proof.device import DEVICE, needs_kernels
from workers.forward.backends import choice, triton
from workers.forward.backends.base import AttentionSetting, StepKind, all_backends
from workers.forward.backends.sdpa import SdpaBackend
from workers.forward.backends.triton import TritonBackend
from workers.forward.cuda_graphs import PackedBuffers
from workers.forward.graph_sizes import GraphSize
from workers.forward.layout import RowShape
from workers.kv.eight_bits import STORED_TYPES, record_bytes
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.spec import LayerShape
from workers.kv.store import KvStore

pytestmark = needs_kernels()

POOL = 40
CLOSE = 2e-6 if DEVICE.type == "cpu" else 2e-5
"""Float32. The exponential of a GPU is an approximation."""
WINDOWS = [AttentionWindow(), AttentionWindow(19), AttentionWindow(19, sinks=3)]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    size: int
    latent: int | None = None


def setting_of(
    shape: Shape,
    dtype: torch.dtype,
    blocks: int = POOL,
    soft_cap: float | None = None,
    stored: torch.dtype | None = None,
) -> AttentionSetting:
    """Layers with each window over one pool of random numbers, in 8 bits if `stored` says so."""
    layer = LayerShape(
        shape.kv_heads,
        shape.dim,
        heads_per_kv=shape.heads // shape.kv_heads,
        soft_cap=soft_cap,
        latent_dim=shape.latent,
    )
    placements = tuple(LayerPlacement(0, 0, window) for window in WINDOWS)
    groups, generator = KvCacheGroups(KvLayout(shape.size), placements, (layer,)), torch.Generator().manual_seed(0)
    numbers = blocks + 1, shape.size, shape.kv_heads, shape.dim
    keys, values = (torch.randn(numbers, generator=generator).to(DEVICE, dtype) for _ in range(2))
    nothing = keys.new_empty(0)
    if stored is None:
        store = KvStore(groups, [keys], [values if shape.latent is None else nothing])
    else:
        empty = torch.zeros((*numbers[:2], record_bytes(layer)), dtype=torch.uint8, device=DEVICE)
        store = KvStore(groups, [empty], [empty.clone() if shape.latent is None else nothing], stored)
        store.write(0, torch.arange(numbers[0] * shape.size, device=DEVICE), keys.flatten(0, 1), values.flatten(0, 1))
    return AttentionSetting(store, (layer,) * len(WINDOWS), blocks, dtype, DEVICE)


def rows_of(shapes: Sequence[tuple[int, int, TokenTree]], size: int, seed: int = 1) -> list[RowShape]:
    """Rows (stored, fresh, tree) whose blocks lie anywhere in the pool."""
    order = iter(torch.randperm(POOL, generator=torch.Generator().manual_seed(seed)).tolist())
    return [
        RowShape([[BlockId(next(order)) for _ in range(-(-(stored + fresh + len(tree)) // size))]], stored, fresh, tree)
        for stored, fresh, tree in shapes
    ]


def poison(setting: AttentionSetting, rows: Sequence[RowShape]) -> None:
    """Write NaN wherever no row may read: behind every row's end and into blocks that no row holds."""
    size = setting.block_size
    held = {block: index * size for row in rows for index, block in enumerate(row.blocks[0])}
    ends = {block: row.end for row in rows for block in row.blocks[0]}
    for stored in (*setting.store.keys, *setting.store.values):
        for block in range(len(stored)):
            used = 0 if block not in held else max(0, min(size, ends[BlockId(block)] - held[BlockId(block)]))
            stored[block, used:] = float("nan") if stored.dtype.is_floating_point else 0xFF  # so that scales are NaN


def attended(backend: object, rows: Sequence[RowShape], queries: torch.Tensor) -> list[torch.Tensor]:
    plan = backend.plan(rows)  # type: ignore[attr-defined]
    return [backend.attend(layer, queries, plan, None) for layer in range(len(WINDOWS))]  # type: ignore[attr-defined]


def queries_of(rows: Sequence[RowShape], shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    tokens = sum(row.width for row in rows)
    drawn = torch.randn((tokens, shape.heads, shape.dim), generator=torch.Generator().manual_seed(2))
    return drawn.to(DEVICE, dtype)


TREE = TokenTree((1, 2, 3, 4, 5, 6), (-1, -1, 0, 0, 3, 4))
WIDE = TokenTree(tuple(range(70)), tuple(index - 1 if index % 3 else -1 for index in range(70)))
MIXED = [
    (37, 1, TREE),
    (16, 1, EMPTY_TREE),
    (0, 70, EMPTY_TREE),
    (5, 3, TokenTree.chain(range(9))),
    (21, 1, EMPTY_TREE),
]


@pytest.mark.parametrize("shape", [
    Shape(4, 4, 64, 16), Shape(8, 2, 64, 16), Shape(6, 2, 80, 32), Shape(4, 1, 96, 16), Shape(16, 1, 128, 16),
    Shape(4, 2, 256, 16), Shape(8, 2, 64, 128), Shape(32, 1, 64, 16), Shape(20, 1, 40, 16, latent=32),
    Shape(6, 1, 24, 16, latent=16),
])  # fmt: skip
def test_every_kind_of_row_equals_the_reference(shape: Shape) -> None:
    setting = setting_of(shape, torch.float32)
    rows = rows_of(MIXED, shape.size)
    queries = queries_of(rows, shape, torch.float32)
    expected = attended(SdpaBackend(setting), rows, queries)
    poison(setting, rows)
    for ours, theirs in zip(attended(TritonBackend(setting), rows, queries), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("kv", STORED_TYPES)
@pytest.mark.parametrize("shape", [Shape(8, 2, 64, 16), Shape(6, 3, 20, 32), Shape(6, 1, 40, 16, latent=32)])
def test_keys_and_values_in_8_bits_equal_the_reference(shape: Shape, kv: str) -> None:
    setting = setting_of(shape, torch.float32, stored=STORED_TYPES[kv])
    rows = rows_of(MIXED, shape.size)
    queries = queries_of(rows, shape, torch.float32)
    expected = attended(SdpaBackend(setting), rows, queries)
    poison(setting, rows)
    for ours, theirs in zip(attended(TritonBackend(setting), rows, queries), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2 * CLOSE, rtol=2 * CLOSE)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, torch.int8),
        (torch.float16, torch.float8_e4m3fn),
    ],
)
def test_half_precision_is_close(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    shape = Shape(8, 2, 64, 16)
    setting, rows = setting_of(shape, dtype, stored=stored), rows_of(MIXED, 16)
    queries = queries_of(rows, shape, dtype)
    expected = attended(SdpaBackend(setting), rows, queries)
    for ours, theirs in zip(attended(TritonBackend(setting), rows, queries), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("layer", "stored"), [
    (LayerShape(2, 32, heads_per_kv=4), None),
    (LayerShape(1, 40, heads_per_kv=6, latent_dim=32), None),
    (LayerShape(1, 40, heads_per_kv=6, latent_dim=32), torch.int8),
    (LayerShape(2, 32, heads_per_kv=4, soft_cap=5.0), None),
    (LayerShape(2, 32, heads_per_kv=4, has_learned_sinks=True), None),
    (LayerShape(2, 32, heads_per_kv=4), torch.int8),
    (LayerShape(2, 32, heads_per_kv=4), torch.float8_e4m3fn),
])  # fmt: skip
def test_the_trial_of_the_choice_passes(stored: torch.dtype | None, layer: LayerShape) -> None:
    plugins = {plugin.name: plugin for plugin in all_backends()}
    triton, suited = plugins["triton"], setting_of(Shape(8, 2, 32, 16), torch.float32, stored=stored)
    setting = choice._trial_setting(suited, layer, triton.capabilities)
    assert choice._agrees(triton, plugins["sdpa"], setting, StepKind.RAGGED)


@pytest.mark.parametrize("shape", [Shape(8, 2, 64, 16), Shape(4, 4, 32, 64)])
def test_soft_caps_and_learned_sinks_equal_the_reference(shape: Shape) -> None:
    setting = setting_of(shape, torch.float32, soft_cap=2.0)
    shapes = [*MIXED[:3], (1100 if shape.size == 64 else 90, 1, TREE)]  # with keys in several splits
    rows = rows_of(shapes, shape.size)
    queries = 3 * queries_of(rows, shape, torch.float32)
    sinks = torch.linspace(-4, 6, shape.heads, device=DEVICE)
    reference, ours = SdpaBackend(setting), TritonBackend(setting)
    plans = reference.plan(rows), ours.plan(rows)
    for layer in range(len(WINDOWS)):
        capped = ours.attend(layer, queries, plans[1], 0.3)
        torch.testing.assert_close(
            capped, reference.attend(layer, queries, plans[0], 0.3), atol=2 * CLOSE, rtol=2 * CLOSE
        )
        sunk = ours.attend_with_sinks(layer, queries, plans[1], 0.3, sinks)
        expected = reference.attend_with_sinks(layer, queries, plans[0], 0.3, sinks)
        torch.testing.assert_close(sunk, expected, atol=2 * CLOSE, rtol=2 * CLOSE)
        assert (sunk - capped).abs().max() > 0.05, "the sinks took a share"


@pytest.mark.parametrize("size", [GraphSize(4, 64, 32, 20, 32), GraphSize(8, 192, 192, 12, 8)])
def test_a_row_has_the_same_bits_in_a_cuda_graph_of_any_size(size: GraphSize) -> None:
    shape = Shape(4, 2, 32, 64)  # the longest row has several splits
    setting = setting_of(shape, torch.float32)
    prompts = [(70, 100, EMPTY_TREE)] if size.has_wide_rows else []
    rows = rows_of([(37, 1, TREE), (560, 1, TokenTree.chain(range(5))), (0, 3, EMPTY_TREE), *prompts], 64)
    queries = queries_of(rows, shape, torch.float32)
    backend = TritonBackend(setting)
    expected = attended(backend, rows, queries)
    poison(setting, rows)
    buffers = PackedBuffers(size, backend, setting.device)
    tokens = range(len(queries))
    for step in (rows[1:2], rows):  # the data of the first step does not affect the second
        buffers.fill(step, tokens, [position for row in rows for position in row.positions()], [3])
    plan = buffers.metadata()
    padded = torch.cat(
        (queries, torch.full((size.tokens - len(queries), *queries.shape[1:]), torch.nan, device=DEVICE))
    )
    for layer, right in enumerate(expected):
        found = backend.attend(layer, padded, plan, None)
        assert torch.equal(found[: len(queries)], right)
        if layer == 0:
            assert found[len(queries) :].isnan().all()
    before = [one.clone() for one in (*setting.store.keys, *setting.store.values)]
    backend.write(0, padded[:, :2], padded[:, :2], plan)
    held = {block for row in rows for block in row.blocks[0]} | {setting.scratch}
    for stored, earlier in zip((*setting.store.keys, *setting.store.values), before, strict=True):
        others = [block for block in range(len(stored)) if block not in held]
        assert torch.equal(stored[others].nan_to_num(7), earlier[others].nan_to_num(7))
    assert buffers.tokens[0, : len(queries)].tolist() == list(tokens)
    assert buffers.selected[0] == 3


@pytest.mark.parametrize("kv", [None, *STORED_TYPES.values()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [Shape(8, 2, 64, 16), Shape(6, 3, 80, 32), Shape(6, 1, 40, 16, latent=32)])
def test_what_is_stored_has_the_bits_of_the_reference(shape: Shape, dtype: torch.dtype, kv: torch.dtype | None) -> None:
    rows = rows_of([(37, 1, TREE), (16, 3, EMPTY_TREE)], shape.size)
    tokens = sum(row.width for row in rows)
    # As a projection of keys and values together returns them: heads lie apart.
    both = torch.randn(tokens, 2, shape.kv_heads, shape.dim, generator=torch.Generator().manual_seed(3)).to(
        DEVICE, dtype
    )
    both[0, :, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0], device=DEVICE)
    both[1:, 0] *= torch.logspace(-9, 3, tokens - 1, device=DEVICE)[:, None, None]
    stored = []
    for backend_type in (SdpaBackend, TritonBackend):
        setting = setting_of(shape, dtype, stored=kv)
        backend = backend_type(setting)
        backend.write(0, both[:, 0], both[:, 1], backend.plan(rows))  # type: ignore[arg-type]
        stored.append((*setting.store.keys, *setting.store.values))
    for ours, theirs in zip(*stored, strict=True):
        assert torch.equal(ours, theirs)


def test_trees_of_more_than_one_word() -> None:
    shape = Shape(4, 2, 32, 16)
    setting, rows = setting_of(shape, torch.float32), rows_of([(30, 1, WIDE), (3, 1, TREE)], 16)
    queries = queries_of(rows, shape, torch.float32)
    expected = attended(SdpaBackend(setting), rows, queries)
    for ours, theirs in zip(attended(TritonBackend(setting), rows, queries), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize(
    ("heads", "stored", "kv"), [(2, 95, None), (2, 1018, torch.int8), (3, 1018, None), (4, 95, None), (4, 1018, None)]
)
def test_a_draft_changes_no_bit(heads: int, stored: int, kv: torch.dtype | None) -> None:
    """A token has the same bits as a node of a chain and in a step of its own, under each window, where splits end.

    With three or four heads per KV head, the first eight tokens of the chain are one tall tile.
    """
    shape = Shape(heads, 1, 16, 16)
    setting = setting_of(shape, torch.float32, blocks=80, stored=kv)
    backend, chain = TritonBackend(setting), 12
    held = [[BlockId(block) for block in range(-(-(stored + 1 + chain) // 16))]]
    drafted = RowShape(held, stored, 1, TokenTree.chain(range(chain)))
    queries = queries_of([drafted], shape, torch.float32)
    assert backend.plan([drafted]).queries[WINDOWS[0]][0].tile == (8 if DEVICE.type == "cpu" or heads < 3 else 4)
    together = attended(backend, [drafted], queries)
    for node in (0, 3, 4, 7, 8, 12):
        plain = attended(backend, [RowShape(held, stored + node, 1, EMPTY_TREE)], queries[node : node + 1])
        for alone, beside in zip(plain, together, strict=True):
            assert torch.equal(alone[0], beside[node])


@pytest.mark.parametrize("kv", [None, torch.int8])
def test_neighbours_change_no_bit(kv: torch.dtype | None) -> None:
    shape = Shape(4, 2, 32, 64)  # POOL blocks of 64: a long row has several splits
    setting = setting_of(shape, torch.float32, stored=kv)
    shapes = [(37, 1, TREE), (1500, 1, EMPTY_TREE), (0, 66, EMPTY_TREE), (700, 1, TokenTree.chain(range(5)))]
    rows = rows_of(shapes, 64)
    queries = queries_of(rows, shape, torch.float32)
    backend, first = TritonBackend(setting), 0
    together = attended(backend, rows, queries)
    expected = attended(SdpaBackend(setting), rows, queries)
    for row in rows:
        own = slice(first, first + row.width)
        for alone, beside, right in zip(attended(backend, [row], queries[own]), together, expected, strict=True):
            assert torch.equal(alone, beside[own])
            torch.testing.assert_close(alone, right[own], atol=CLOSE, rtol=CLOSE)
        first += row.width


def test_launches_of_their_own_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with many splits are computed apart from others, so that the sums of splits take a bounded memory."""
    shape = Shape(4, 2, 32, 64)
    setting = setting_of(shape, torch.float32)
    shapes = [(37, 1, TREE), (1200, 1, TokenTree.chain(range(5))), (0, 66, EMPTY_TREE), (700, 1, EMPTY_TREE)]
    rows = rows_of(shapes, 64)
    queries = queries_of(rows, shape, torch.float32)
    backend = TritonBackend(setting)
    together = attended(backend, rows, queries)
    monkeypatch.setattr(triton, "_MOST_SUMS", 1)
    for alone, beside in zip(attended(backend, rows, queries), together, strict=True):
        assert torch.equal(alone, beside)
    assert [len(parts) for parts in backend.plan(rows).queries.values()] == [4] * len(WINDOWS)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    nodes = draw(st.integers(0, 64))
    parents = [draw(st.integers(-1, node - 1)) for node in range(nodes)]
    return TokenTree(tuple(range(nodes)), tuple(parents))


STORED_ROWS = st.one_of(
    st.tuples(st.integers(0, 60), st.just(1), st.just(EMPTY_TREE)),  # a token
    st.tuples(st.integers(0, 60), st.integers(2, 70), st.just(EMPTY_TREE)),  # a chunk of a prompt
    st.tuples(st.integers(0, 60), st.integers(1, 5), trees()),
)


@settings(max_examples=6, deadline=None)
@given(st.data(), st.lists(STORED_ROWS, min_size=1, max_size=3))
def test_any_rows_equal_the_reference_and_their_own_bits_alone(
    data: st.DataObject, shapes: list[tuple[int, int, TokenTree]]
) -> None:
    """Under any shape of heads, block size, stored type, window, soft cap and sinks. Nothing behind a row is read."""
    group = data.draw(st.sampled_from([1, 2, 4, 8, 16]), label="query heads of a KV head")
    kv_heads = 1 if group > 4 else 2
    dim, size = data.draw(st.sampled_from([64, 80, 96, 128, 256])), data.draw(st.sampled_from([16, 32, 64, 128]))
    stored = data.draw(st.sampled_from([None, *STORED_TYPES.values()]), label="stored type")
    soft_cap = data.draw(st.sampled_from([None, 2.0]), label="soft cap")
    has_sinks = data.draw(st.booleans(), label="learned sinks")
    layer = data.draw(st.sampled_from(range(len(WINDOWS))), label="window")
    shape = Shape(group * kv_heads, kv_heads, dim, size)
    setting, rows = setting_of(shape, torch.float32, soft_cap=soft_cap, stored=stored), rows_of(shapes, size)
    queries, sinks = queries_of(rows, shape, torch.float32), torch.linspace(-4, 6, shape.heads, device=DEVICE)

    def attention(backend: Any, of: Sequence[RowShape], own: torch.Tensor) -> torch.Tensor:
        return attended_by(backend, layer, own, backend.plan(of), sinks if has_sinks else None)

    expected, backend, first = attention(SdpaBackend(setting), rows, queries), TritonBackend(setting), 0
    poison(setting, rows)
    together = attention(backend, rows, queries)
    torch.testing.assert_close(together, expected, atol=2 * CLOSE, rtol=2 * CLOSE)
    for row in rows:
        own = slice(first, first + row.width)
        assert torch.equal(attention(backend, [row], queries[own]), together[own])
        first += row.width


def attended_by(backend: Any, layer: int, queries: torch.Tensor, plan: Any, sinks: torch.Tensor | None) -> torch.Tensor:
    """What a backend attends to, with or without learned sinks."""
    found: torch.Tensor = (
        backend.attend(layer, queries, plan, 0.1)
        if sinks is None
        else backend.attend_with_sinks(layer, queries, plan, 0.1, sinks)
    )
    return found


GROUPS, SIZES = (1, 8, 16), (16, 64, 128)
STORED = (None, torch.float8_e4m3fn, torch.int8)


@pytest.mark.parametrize("soft_cap", [None, 2.0], ids=["plain", "soft cap"])
@pytest.mark.parametrize("stored", STORED, ids=["bfloat16", "fp8", "int8"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("group", GROUPS)
def test_each_combination_equals_the_reference(
    group: int, size: int, stored: torch.dtype | None, soft_cap: float | None
) -> None:
    """Under each window: without one, over the last tokens alone, and over these and the first ones.

    Learned sinks are under every other window, with a soft cap and without one in turn. The tokens lie on both sides
    of the end of a block of any size, and the draft has two branches.
    """
    dtype, close = (torch.bfloat16, 2e-2) if stored is None else (torch.float32, 2 * CLOSE)
    shape = Shape(group, 1, 16, size)
    setting = setting_of(shape, dtype, blocks=12, soft_cap=soft_cap, stored=stored)
    held = [[BlockId(block) for block in (7, 2, 9, 4, 0, 11, 5, 1, 10)]]
    rows = [RowShape(held, 126, 1, TokenTree((1, 2, 3), (-1, 0, 0)))]
    queries = 9 * queries_of(rows, shape, dtype)
    learned = torch.linspace(-4, 6, shape.heads, device=DEVICE)
    reference, ours = SdpaBackend(setting), TritonBackend(setting)
    plans = reference.plan(rows), ours.plan(rows)
    case = GROUPS.index(group) + SIZES.index(size) + STORED.index(stored) + (soft_cap is not None)
    for layer in range(len(WINDOWS)):
        sinks = learned if (case + layer) % 2 else None
        expected = attended_by(reference, layer, queries, plans[0], sinks)
        found = attended_by(ours, layer, queries, plans[1], sinks)
        torch.testing.assert_close(found, expected, atol=close, rtol=close)
