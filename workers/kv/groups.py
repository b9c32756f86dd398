"""KV cache groups: which layers share block tables, and where each layer stores its keys and values.

Layers that see the same positions form a group. All blocks have the same size, so any block can serve any group.
A block is `depth` layers deep; `depth` divides the number of layers of every group. A group of n layers has
n / depth block tables per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from cluster.core.config.model_section import PoolSection
from cluster.core.kv import KvGroup, KvLayout
from workers.kv.spec import KvCacheSpec, LayerShape

_MAX_TABLES = 64
"""Most tables per sequence. With more, handling them takes more time than the freed blocks are worth."""


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The positions that a query sees: the last `size`, its own included, and the first `sinks`."""

    size: int | None = None
    """`None`: every position up to its own."""
    sinks: int = 0

    def first_visible(self, position: int) -> int:
        """The first position inside the window of the query at `position`. Sinks are not considered."""
        return 0 if self.size is None else max(0, position - self.size + 1)

    def sees(self, position: int, key: int) -> bool:
        """Whether the query at `position` sees the earlier position `key`."""
        return key < self.sinks or key >= self.first_visible(position)


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The storage of one layer's keys and values, and the window that its queries see."""

    table: int
    """Index of the layer's block table among the sequence's tables."""
    block_layer: int
    """Index of the layer inside a block."""
    window: AttentionWindow


@dataclass(frozen=True, slots=True)
class KvCacheGroups:
    """The placement of all layers of a model."""

    layout: KvLayout
    placements: tuple[LayerPlacement, ...]
    """One per layer of the model."""
    block_layers: tuple[LayerShape, ...]
    """The contents of a block, one entry per layer of its depth."""
    is_lossless: bool = True
    """Whether every layer sees all positions that the model itself would see."""


def group_layers(spec: KvCacheSpec, section: PoolSection, truncatable: bool = False) -> KvCacheGroups:
    """Group the model's layers by the positions they see.

    All layers share one table, and windows only mask, in four cases: the pool is `truncatable` (sequences may be
    cut to any length, so nothing may be freed early), tables hold sources, the layers differ in shape, or no common
    depth keeps the number of tables small.
    """
    windows = [_visible_window(shape, section, spec.max_context_len) for shape in spec.layers]
    groups: dict[AttentionWindow, list[int]] = {}
    for layer, window in enumerate(windows):
        groups.setdefault(window, []).append(layer)
    depth = gcd(*(len(layers) for layers in groups.values()))
    is_lossless = not any(_hides_positions(section, shape, spec.max_context_len) for shape in spec.layers)
    same_shape = len({(shape.kv_heads, shape.head_dim, shape.latent_dim) for shape in spec.layers}) == 1
    if truncatable or spec.has_sources or not same_shape or len(spec.layers) // depth > _MAX_TABLES:
        placements = tuple(LayerPlacement(0, layer, window) for layer, window in enumerate(windows))
        return KvCacheGroups(KvLayout(section.block_size), placements, spec.layers, is_lossless)
    placed: dict[int, LayerPlacement] = {}
    table = 0
    for window, layers in groups.items():
        for index, layer in enumerate(layers):
            placed[layer] = LayerPlacement(table + index // depth, index % depth, window)
        table += len(layers) // depth
    layout = KvLayout(section.block_size, tuple(_kv_group(window, layers, depth) for window, layers in groups.items()))
    return KvCacheGroups(layout, tuple(placed[layer] for layer in sorted(placed)), spec.layers[:depth], is_lossless)


def _kv_group(window: AttentionWindow, layers: Sequence[int], depth: int) -> KvGroup:
    return KvGroup(len(layers) // depth, window.size, window.sinks)


def _visible_window(shape: LayerShape, section: PoolSection, max_context_len: int) -> AttentionWindow:
    """The layer's own window, or else the configured one. A window as long as the context counts as none."""
    if shape.window is None and section.window:
        window = AttentionWindow(section.window, section.sinks)
    else:
        window = AttentionWindow(shape.window)
    return AttentionWindow() if window.size is not None and window.size >= max_context_len else window


def _hides_positions(section: PoolSection, shape: LayerShape, max_context_len: int) -> bool:
    """Whether the configured window hides positions of the longest sequence that this layer would see."""
    return shape.window is None and section.window is not None and section.window + section.sinks < max_context_len
