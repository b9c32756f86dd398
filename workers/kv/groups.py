"""Which layers share a block table, and where each keeps its keys and values.

Layers that see the same positions form a group. All blocks have one size, so that any of them can serve any
group: each is `depth` layers deep, where `depth` divides every group's number of layers, and a group of n layers
has n ÷ depth tables per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from cluster.core.config import PoolSection
from cluster.core.kv import KvGroup, KvLayout
from workers.kv.spec import KvCacheSpec, LayerShape

_MOST_TABLES = 64
"""Beyond it the tables of a sequence cost more time than what a window frees is worth."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Which positions a query sees: those at most `window - 1` before it, and the first `sinks`."""

    window: int | None = None
    sinks: int = 0

    def first_seen(self, position: int) -> int:
        """First position that the query at `position` sees, sinks aside."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def sees(self, position: int, key: int) -> bool:
        """Whether the query at `position` sees the position `key` before it."""
        return key < self.sinks or key >= self.first_seen(position)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one layer keeps its keys and values, and what it sees of them."""

    table: int
    """Of the sequence's tables."""
    slot: int
    """Of the pool's layers of blocks."""
    sight: Sight


@dataclass(frozen=True, slots=True)
class Arrangement:
    """All layers' places."""

    layout: KvLayout
    places: tuple[Place, ...]
    """One per layer of the model."""
    slots: tuple[LayerShape, ...]
    """What a block holds, one entry per layer of its depth."""
    is_lossless: bool = True
    """Whether every layer sees all positions that the model itself would see."""


def arrange(spec: KvCacheSpec, section: PoolSection, rewinds: bool = False) -> Arrangement:
    """Group the model's layers.

    With `rewinds` sequences may be cut back to any length: everything is kept and windows only mask. So it is,
    too, where layers differ in shape or fit no common depth.
    """
    sights = [_sight(shape, section, spec.max_context_len) for shape in spec.layers]
    groups: dict[Sight, list[int]] = {}
    for layer, sight in enumerate(sights):
        groups.setdefault(sight, []).append(layer)
    depth = gcd(*(len(layers) for layers in groups.values()))
    is_lossless = not any(_hides(section, shape, spec.max_context_len) for shape in spec.layers)
    alike = len({(shape.kv_heads, shape.head_dim) for shape in spec.layers}) == 1
    if rewinds or not alike or len(spec.layers) // depth > _MOST_TABLES:
        places = tuple(Place(0, layer, sight) for layer, sight in enumerate(sights))
        return Arrangement(KvLayout(section.block_size), places, spec.layers, is_lossless)
    found: dict[int, Place] = {}
    table = 0
    for sight, layers in groups.items():
        for index, layer in enumerate(layers):
            found[layer] = Place(table + index // depth, index % depth, sight)
        table += len(layers) // depth
    layout = KvLayout(section.block_size, tuple(_group(sight, layers, depth) for sight, layers in groups.items()))
    return Arrangement(layout, tuple(found[layer] for layer in range(len(found))), spec.layers[:depth], is_lossless)


def _group(sight: Sight, layers: Sequence[int], depth: int) -> KvGroup:
    return KvGroup(len(layers) // depth, sight.window, sight.sinks)


def _sight(shape: LayerShape, section: PoolSection, max_context_len: int) -> Sight:
    """What a layer sees: its own window, or else the configured one. A window as long as the context is none."""
    sight = Sight(section.window, section.sinks) if shape.window is None and section.window else Sight(shape.window)
    return Sight() if sight.window is not None and sight.window >= max_context_len else sight


def _hides(section: PoolSection, shape: LayerShape, max_context_len: int) -> bool:
    """Whether the configured window hides positions of the longest sequence that this layer would see."""
    return shape.window is None and section.window is not None and section.window + section.sinks < max_context_len
