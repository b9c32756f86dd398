"""A drafting module's pass on a fake device, with the sizes of a head for Qwen3-8B: what it launches, and no wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from deploy.simulation.device.fake_device import Kernel, KernelCounter, fake_device
from workers.draft.block.block_pass import BlockPass
from workers.draft.common.modules.context_window import ContextRows, ContextShape, ContextWindow
from workers.draft.eagle.eagle_pass import EaglePass, EaglePiece
from workers.forward import window_attention
from workers.forward.native.window_layers import WindowPiece
from workers.forward.triton.tiles import WindowTiles
from workers.model.draft_shapes import BlockShape, EagleShape, LayerShape
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds

pytestmark = pytest.mark.slow

HIDDEN, VOCABULARY, TAPS = 4096, 151936, 3
LAYER = LayerShape(HIDDEN, 32, 8, 128, 12288, rope_theta=1e6, norm_epsilon=1e-6, window=2048)
STORED, NODES = 300, 4


class CountedWindows:
    """The kernels over windows, which are counted instead of launched."""

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter

    def write_windows(self, keys: Tensor, values: Tensor, tiles: WindowTiles, layer: int) -> None:
        self._counter.add(Kernel("store_windows", 2 * (keys.nbytes + values.nbytes)))

    def window_attention(
        self,
        queries: Tensor,
        tiles: WindowTiles,
        layer: int,
        kv_heads: int,
        value_dim: int,
        scale: float,
    ) -> Tensor:
        assert tiles.table.device == queries.device
        self._counter.add(Kernel("attend_windows", 2 * queries.nbytes))
        return queries.new_empty((*queries.shape[:2], value_dim))


def counted(
    monkeypatch: pytest.MonkeyPatch, prepared: Callable[[TargetEnds, torch.device], Callable[[], Tensor]]
) -> KernelCounter:
    """What a pass launches, whose parts are `prepared` before."""
    counter = KernelCounter()
    monkeypatch.setattr(window_attention, "kernels_for", lambda *_: CountedWindows(counter))
    monkeypatch.setattr(window_attention, "address_of", lambda _: 0)
    monkeypatch.setattr(window_attention, "bytes_of", lambda mask: np.ones(mask.numel(), dtype=np.uint8))
    monkeypatch.setattr(TargetEnds, "embedding_scale", lambda _: 1.0)  # it is read of the weights
    with fake_device() as device, torch.inference_mode():
        tables = [torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2)]
        ends = TargetEnds(tables[0], tables[1], torch.empty(HIDDEN, device=device), 1e-6, None)
        run = prepared(ends, device)
        with counter:
            run()
    return counter


def eagle_pass(monkeypatch: pytest.MonkeyPatch, rows: int, layers: int = 1) -> KernelCounter:
    """One depth of as many trees, and the logits of its candidates."""

    def prepared(ends: TargetEnds, device: torch.device) -> Callable[[], Tensor]:
        with torch.device(device):
            head = EaglePass(EagleHead(ends, EagleShape(LAYER, layers=layers), TAPS), ends, "bfloat16", 64)
        pieces = []
        for _ in range(rows):
            keys = torch.empty(layers, 8, STORED + 64, 128, device=device)
            seen = torch.ones(NODES, STORED + NODES, dtype=torch.bool)
            window = WindowPiece(keys, keys, STORED, NODES, seen)
            pieces.append(EaglePiece(window, range(NODES), range(STORED, STORED + NODES), range(NODES)))
        features = torch.empty(rows * NODES, HIDDEN, device=device)
        return lambda: head.logits(head.run(features, pieces))

    return counted(monkeypatch, prepared)


def block_pass(monkeypatch: pytest.MonkeyPatch, rows: int) -> KernelCounter:
    """The blocks of as many rows."""

    def prepared(ends: TargetEnds, device: torch.device) -> Callable[[], Tensor]:
        with torch.device(device):
            module = BlockDrafter(ends, BlockShape(LAYER, block=NODES, layers=2, selector_rank=0), TAPS)
            passes = BlockPass(module, ends, "bfloat16")
        windows = [ContextWindow(passes.context_shape, device) for _ in range(rows)]
        for window in windows:
            window.store(0, _context(passes.context_shape, device))
        return lambda: passes.draft([0] * rows, [STORED] * rows, windows)

    return counted(monkeypatch, prepared)


def _context(shape: ContextShape, device: torch.device) -> ContextRows:
    keys = torch.empty(shape.layers, shape.kv_heads, STORED, shape.head_width, device=device)
    return ContextRows(keys, keys, torch.empty(STORED, shape.feature_size, device=device))


def test_trees_of_many_rows_take_as_many_launches_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host copies twice: the tokens, and where the windows are. The candidates are read later."""
    one, many = (eagle_pass(monkeypatch, rows) for rows in (1, 64))
    names = [[kernel.name for kernel in counter.eager()] for counter in (one, many)]
    assert names[0] == names[1]
    assert (one.copies, many.copies) == (2, 2)
    assert names[0].count("attend_windows") == names[0].count("store_windows") == 1


def test_each_layer_launches_the_same_number_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [len(eagle_pass(monkeypatch, 8, layers).eager()) for layers in (1, 2, 3)]
    assert counts[2] - counts[1] == counts[1] - counts[0]


def test_blocks_of_many_rows_take_as_many_launches_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = (block_pass(monkeypatch, rows) for rows in (1, 64))
    names = [[kernel.name for kernel in counter.eager()] for counter in (one, many)]
    assert names[0] == names[1]
    assert names[0].count("attend_windows") == 2
    assert one.copies == many.copies
