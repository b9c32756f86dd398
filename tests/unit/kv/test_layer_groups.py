"""Layers with the same window share a block table; every table has the same number of layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.kv import KvGroup
from tests.support.models import tiny
from workers.forward.loaded_model import LoadedModel
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement, group_layers
from workers.kv.pool import KvPool
from workers.kv.pool_size import block_bytes, blocks_that_fit
from workers.kv.spec import KvCacheSpec, LayerShape
from workers.model.loading import load_model

FULL, LOCAL = LayerShape(2, 8), LayerShape(2, 8, window=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tiny.save(tmp_path_factory.mktemp("target"), tiny.mistral(num_hidden_layers=3))
    return load_model(ModelSection(path=str(directory), device="cpu"))


def spec(*layers: LayerShape) -> KvCacheSpec:
    return KvCacheSpec(layers, max_context_len=1000, dtype=torch.float32, device=torch.device("cpu"))


def grouped(*layers: LayerShape, truncatable: bool = False, **section: int) -> KvCacheGroups:
    return group_layers(spec(*layers), KvSection(**section), truncatable)


def test_layers_with_the_same_window_share_one_table() -> None:
    found = grouped(FULL, FULL, FULL)
    assert found.layout.groups == (KvGroup(),)
    assert found.placements == tuple(LayerPlacement(0, layer, AttentionWindow()) for layer in range(3))
    assert len(found.block_layers) == 3


def test_groups_are_split_into_tables_with_the_same_number_of_layers() -> None:
    found = grouped(*([LOCAL] * 5 + [FULL]) * 3)
    assert found.layout.groups == (KvGroup(5, window=100), KvGroup(1))
    assert len(found.block_layers) == 3
    assert found.placements[:7] == (
        *(LayerPlacement(0, slot, AttentionWindow(100)) for slot in range(3)),
        *(LayerPlacement(1, slot, AttentionWindow(100)) for slot in range(2)),
        LayerPlacement(5, 0, AttentionWindow()),
        LayerPlacement(1, 2, AttentionWindow(100)),
    )
    assert len({(place.table, place.block_layer) for place in found.placements}) == 18


@pytest.mark.parametrize(
    "layers",
    [(FULL, LayerShape(2, 16, window=100)), (FULL, LayerShape(1, 8)), (FULL, *[LOCAL] * 64)],
    ids=["head dimension", "heads", "too many tables"],
)
def test_layers_that_do_not_fit_store_all_positions_and_mask_them(layers: tuple[LayerShape, ...]) -> None:
    found = grouped(*layers)
    assert found.layout.groups == (KvGroup(),)
    assert [place.window for place in found.placements] == [AttentionWindow(shape.window) for shape in layers]
    assert found.block_layers == layers


def test_if_sequences_may_rewind_windows_only_mask() -> None:
    found = grouped(LOCAL, LOCAL, truncatable=True)
    assert found.layout.groups == (KvGroup(),)
    assert found.placements[1] == LayerPlacement(0, 1, AttentionWindow(100))


def test_a_window_as_long_as_the_context_counts_as_no_window() -> None:
    assert grouped(FULL, LayerShape(2, 8, window=1000)).layout.groups == (KvGroup(),)


def test_a_configured_window_applies_to_layers_without_a_window() -> None:
    found = grouped(FULL, LOCAL, window=32, sinks=4)
    assert found.layout.groups == (KvGroup(1, window=32, sinks=4), KvGroup(1, window=100))
    assert grouped(FULL, FULL, window=1000).layout.groups == (KvGroup(),)


def test_the_bytes_of_a_pool_are_the_sum_of_its_blocks(model: LoadedModel) -> None:
    section = KvSection(block_size=4, pool_bytes=1 << 20)
    pool = KvPool(model.kv_spec, section)
    each = block_bytes(pool.kv_groups, model.dtype)
    assert pool.blocks_total == blocks_that_fit(model.kv_spec, section) == (1 << 20) // each
    assert sum(store.nbytes for store in (*pool.keys, *pool.values)) == pool.blocks_total * each


def test_windows_are_measured_not_read_from_the_configuration(model: LoadedModel, tmp_path: Path) -> None:
    assert [shape.window for shape in model.layers] == [24, 24, 24]
    directory = tiny.save(tmp_path, tiny.llama())
    plain = load_model(ModelSection(path=str(directory), device="cpu"))
    assert [shape.window for shape in plain.layers] == [None, None]


def test_only_a_configured_window_that_hides_positions_makes_a_pool_lossy() -> None:
    def is_lossless(*layers: LayerShape, **section: int) -> bool:
        return KvPool(spec(*layers), KvSection(**section), blocks=1).is_lossless

    assert is_lossless(FULL)
    assert is_lossless(LOCAL)  # the model's own window hides only positions that the model never attends to
    assert is_lossless(LOCAL, window=32)  # a layer with a window of its own ignores the configured one
    assert not is_lossless(FULL, window=32)
    assert not is_lossless(LOCAL, FULL, window=999, sinks=0)
    assert is_lossless(FULL, window=1000)  # a window as long as the context
    assert not is_lossless(FULL, window=932, sinks=67)
    assert is_lossless(FULL, window=932, sinks=68)  # sinks and window together cover the context
