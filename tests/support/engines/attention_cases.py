"""Random attention steps for two attention backends: rows with trees, layers with windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from cluster.core.config.target_section import KvSection
from cluster.core.ids import BlockId
from cluster.core.tree import TokenTree
from workers.forward.backends.base import AttentionSetting
from workers.forward.backends.native import NativeBackend
from workers.forward.backends.sdpa import SdpaBackend
from workers.forward.layout import RowShape, blocks_read
from workers.kv.block_table import OUT_OF_WINDOW
from workers.kv.pool import KvPool
from workers.kv.spec import KvCacheSpec, LayerShape

CPU = torch.device("cpu")
CONTEXT = 1000


@dataclass(frozen=True)
class Row:
    """A sequence's share of a step."""

    stored: int
    fresh: int
    parents: tuple[int, ...] = ()

    @property
    def tree(self) -> TokenTree:
        return TokenTree(tuple(range(len(self.parents))), self.parents)

    @property
    def width(self) -> int:
        return self.fresh + len(self.parents)


def setting_of(pool: KvPool, layers: tuple[LayerShape, ...], dtype: torch.dtype, code: str) -> AttentionSetting:
    return AttentionSetting(pool.store, layers, pool.blocks_total, dtype, CPU, code_directory=code)


def spec_of(layers: tuple[LayerShape, ...], dtype: torch.dtype) -> KvCacheSpec:
    return KvCacheSpec(layers, CONTEXT, dtype, CPU)


@dataclass(frozen=True)
class Case:
    """Layers, memory and rows."""

    layers: tuple[LayerShape, ...]
    section: KvSection
    rows: tuple[Row, ...]
    seed: int = 0


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    """No tree, a chain or a branching tree. Few have more nodes than a mask word has bits."""
    count = draw(st.sampled_from([0, 0, 1, 2, 5, 16, 63, 64, 65, 100]))
    if draw(st.booleans()):
        return tuple(range(-1, count - 1))
    seed = draw(st.randoms(use_true_random=False))
    return tuple(seed.randint(max(-1, node - 6), node - 1) for node in range(count))


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A chunk of a prompt, a token, or a tree, after a short or long stored prefix."""
    stored = draw(st.one_of(st.integers(0, 5), st.integers(0, 70), st.integers(200, 300)))
    fresh = draw(st.one_of(st.just(1), st.integers(1, 9), st.integers(30, 60)))
    return Row(stored, fresh, draw(trees()))


@st.composite
def cases(draw: st.DrawFn, dims: Sequence[int] = (8, 12, 16, 20, 32, 48, 64, 80, 128)) -> Case:
    """Layers of one shape, with a head dimension among `dims`. Some have windows, or all have a configured one.

    Where heads share one key, it may hold its value. Heads may have slopes of ALiBi, each another one.
    Keys and values are stored in the model's type or in 8 bits.
    """
    kv_heads, shared = draw(st.sampled_from([(1, 1), (3, 1), (2, 3), (1, 8), (1, 32), (2, 4)]))
    dim = draw(st.sampled_from(dims))
    latent = draw(st.sampled_from([None, dim // 2, dim - 3])) if kv_heads == 1 else None
    windows = draw(st.lists(st.sampled_from([None, None, 2, 7, 16, 33, 100]), min_size=1, max_size=3))
    section = KvSection(
        dtype=draw(st.sampled_from(["auto", "int8", "fp8"])),
        block_size=draw(st.sampled_from([1, 3, 4, 16, 32])),
        window=draw(st.sampled_from([None, None, 16, 40])),
        sinks=draw(st.sampled_from([0, 1, 4, 20])),
    )
    slopes = tuple(0.5 / (1 + head) for head in range(kv_heads * shared)) if draw(st.booleans()) else None
    layers = tuple(
        LayerShape(kv_heads, dim, window, shared, latent_dim=latent, alibi_slopes=slopes) for window in windows
    )
    return Case(layers, section, tuple(draw(st.lists(rows(), min_size=1, max_size=4))), draw(st.integers(0, 99)))


class Bench:
    """The tensors of a case and both implementations of attention. A row has the same keys and values in every step."""

    def __init__(self, case: Case, dtype: torch.dtype, code: str, wide: bool = False) -> None:
        """Draw the tensors in `dtype`. With `wide`, compute in single precision with the same values."""
        self.case = case
        self.dtype = torch.float32 if wide else dtype
        spec = spec_of(case.layers, self.dtype)
        size = case.section.block_size
        used = [-(-(row.stored + row.width) // size) for row in case.rows]
        probe = KvPool(spec, case.section, 1)
        tables = probe.layout.tables
        self.pool = KvPool(spec, case.section, tables * sum(used) + 3)
        setting = setting_of(self.pool, case.layers, self.dtype, code)
        self.native, self.reference = NativeBackend(setting), SdpaBackend(setting)
        self.generator = torch.Generator().manual_seed(case.seed)
        shape, slots = case.layers[0], torch.arange(self.pool.blocks_total * size)
        for layer in range(len(case.layers)):
            drawn = (self.draw(dtype, len(slots), shape.kv_heads, shape.head_dim) for _ in range(2))
            self.pool.write(layer, slots, *drawn)
        order = iter(torch.randperm(self.pool.blocks_total, generator=self.generator).tolist())
        self.shapes = [
            RowShape(
                [self._blocks(row, table, count, order) for table in range(tables)], row.stored, row.fresh, row.tree
            )
            for row, count in zip(case.rows, used, strict=True)
        ]
        first = case.layers[0]
        heads, width = (first.kv_heads * first.heads_per_kv, first.kv_heads, first.kv_heads), first.head_dim
        self.fresh = [[self.draw(dtype, 1, count, row.width, width) for count in heads] for row in case.rows]

    def draw(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Normally distributed numbers, rounded to `dtype`."""
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.dtype)

    def _blocks(self, row: Row, table: int, count: int, order: Iterator[int]) -> list[BlockId]:
        """Random blocks of the pool, without those that are outside every window."""
        (window,) = {place.window for place in self.pool.kv_groups.placements if place.table == table}
        whole = RowShape([], row.stored, row.fresh, row.tree)
        sinks, begin, _ = blocks_read(whole, window, self.case.section.block_size)
        return [OUT_OF_WINDOW if sinks <= index < begin else BlockId(next(order)) for index in range(count)]

    def attend(self, layer: int, chosen: Sequence[int] | None = None, *, natively: bool = True) -> list[torch.Tensor]:
        """The result `[width, heads, dim]` of each chosen row, computed in one step."""
        chosen = range(len(self.shapes)) if chosen is None else chosen
        shapes = [self.shapes[index] for index in chosen]
        query, key, value = (
            torch.cat(parts, dim=2)[0].transpose(0, 1)  # [tokens, heads, dim]
            for parts in zip(*(self.fresh[i] for i in chosen), strict=True)
        )
        backend = self.native if natively else self.reference
        metadata = backend.plan(shapes)
        backend.write(layer, key, value, metadata)
        return list(backend.attend(layer, query, metadata, None).split([shape.width for shape in shapes]))
