"""What a loaded model tells of itself."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from cluster.core.kv import KvLayout
from tests.support.engines.packed_reference import PackedReference, packing
from workers.forward.backends.base import AttentionSetting
from workers.forward.cuda_graphs import graph_sizes
from workers.forward.graph_sizes import MOST_TOKENS, GraphSize, packed_graph_sizes, padded_graph_sizes
from workers.forward.loaded_model import LoadedModel
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.spec import TOKENS_ALONE, LayerShape
from workers.kv.store import KvStore

CPU, BLOCK = torch.device("cpu"), 16
FULL = LayerShape(8, 128, heads_per_kv=4)


def model_of(layer: LayerShape, longest: int, hidden: int = 1, vocabulary: int = 1, ranks: int = 1) -> LoadedModel:
    module = cast("Any", nn.Module())
    return LoadedModel(
        module, "a model", (layer,), hidden, vocabulary, 0, longest, (), CPU, torch.bfloat16, tensor_parallel=ranks
    )


@pytest.mark.parametrize("longest", [1000, 4096, 131072])
@pytest.mark.parametrize(("layer", "width", "window"), [
    (FULL, 128, AttentionWindow()),
    (LayerShape(8, 96, heads_per_kv=4), 128, AttentionWindow()),  # rows of a kernel are powers of two
    (LayerShape(1, 576, heads_per_kv=16, latent_dim=512), 512, AttentionWindow()),
    (LayerShape(1, 10, heads_per_kv=8, latent_dim=8), 16, AttentionWindow()),
    (LayerShape(8, 128, window=8192, heads_per_kv=4), 128, AttentionWindow(8192)),
    (FULL, 128, AttentionWindow(1 << 17, sinks=64)),  # of the setting target.kv.window
], ids=["full", "padded", "latents", "narrow", "window", "window of the pool"])  # fmt: skip
def test_graphs_need_no_more_for_attentions_sums_than_is_reserved(
    layer: LayerShape, width: int, window: AttentionWindow, longest: int
) -> None:
    groups = KvCacheGroups(KvLayout(BLOCK), (LayerPlacement(0, 0, window),), (layer,))
    setting = AttentionSetting(KvStore(groups, [], []), (layer,), 100_000, torch.bfloat16, CPU)
    planning, needed = PackedReference(setting), 0
    for size in graph_sizes(setting, packing(setting), longest):
        if size.tokens == MOST_TOKENS:
            planned = planning.plan_packed((), size)
            step = planned.metadata([torch.from_numpy(array) for array in planned.arrays])
            for queries in step.queries[window]:
                numbers = 0 if queries.is_wide else layer.kv_heads * layer.heads_per_kv * (width + 2)
                needed = max(needed, queries.splits * len(queries.tokens) * numbers * 4)
    reserved = model_of(layer, longest).graph_bytes
    assert 0 < needed <= reserved
    if window.size is None and longest == 131072:
        assert reserved < 1.1 * needed


@pytest.mark.parametrize("sizes", [packed_graph_sizes(100), padded_graph_sizes(100)], ids=["packed", "padded"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_logits_are_reserved_for_a_graph_its_soft_cap_and_all_buffers_of_results(
    sizes: list[GraphSize], ranks: int
) -> None:
    buffers = [0]
    for size in reversed(sizes):
        if size.selected > buffers[-1]:
            buffers.append(size.selected)  # those captured before keep the smaller one
    vocabulary = 128_000
    row = -(-vocabulary // ranks) * torch.bfloat16.itemsize
    reserved = model_of(FULL, 1000, vocabulary=vocabulary, ranks=ranks).graph_bytes - model_of(FULL, 1000).graph_bytes
    assert reserved + 5000 >= (sum(buffers) + 2 * max(buffers)) * row


def test_a_model_of_recurrent_layers_alone_does_not_attend() -> None:
    assert not model_of(TOKENS_ALONE, 100).attends
    assert model_of(FULL, 100).attends
