"""A drafting module's pass on a fake device, with the sizes of a head for Qwen3-8B: what it launches, and no wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from cluster.core.request import SamplingParameters, SequenceStart
from deploy.simulation.device.drafting import counted_modules
from deploy.simulation.device.fake_device import KernelCounter, fake_device
from workers.draft.block.block_pass import BlockPass
from workers.draft.common.modules.context_session import ContextSession
from workers.draft.common.modules.context_store import ContextStore
from workers.draft.common.modules.context_window import ContextRows, ContextShape, ContextWindow
from workers.draft.eagle.eagle_pass import EaglePass
from workers.draft.eagle.head_pass import EaglePiece
from workers.forward import graph_sizes
from workers.forward.graph_sizes import MOST_RANKED, drafting_graph_sizes
from workers.forward.native.window_layers import WindowPiece
from workers.model.draft_shapes import BlockShape, EagleShape, LayerShape
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds

pytestmark = pytest.mark.slow

HIDDEN, VOCABULARY, TAPS = 4096, 151936, 3
LAYER = LayerShape(HIDDEN, 32, 8, 128, 12288, rope_theta=1e6, norm_epsilon=1e-6, window=2048)
STORED, NODES = 300, 4


Prepared = Callable[[TargetEnds, torch.device], Callable[[], object]]
"""Makes a module on the device, and returns one of its passes."""


@contextmanager
def fake_module(prepared: Prepared) -> Iterator[tuple[KernelCounter, Callable[[], object]]]:
    """A pass on the fake device, and what counts its kernels over windows."""
    counter = KernelCounter()
    with fake_device() as device, counted_modules(counter), torch.inference_mode():
        tables = [torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2)]
        ends = TargetEnds(tables[0], tables[1], torch.empty(HIDDEN, device=device), 1e-6, None)
        yield counter, prepared(ends, device)


def counted(prepared: Prepared) -> KernelCounter:
    """What a pass launches, whose parts are `prepared` before."""
    with fake_module(prepared) as (counter, run), counter:
        run()
    return counter


class Captures:
    """Stands for the capture of CUDA graphs: it counts the kernels of the last one. A replay launches nothing."""

    def __init__(self) -> None:
        self.counter = KernelCounter()
        self.captured = self.replayed = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        with self.counter:
            function()
        return self._replay

    def _replay(self) -> None:
        self.replayed += 1


def replayed(
    monkeypatch: pytest.MonkeyPatch, prepared: Callable[[Captures], Prepared]
) -> tuple[Captures, KernelCounter]:
    """The captured passes of a module, and what the host launches beside one of them."""
    captures, beside = Captures(), KernelCounter()
    monkeypatch.setattr(graph_sizes, "_ROWS", (1, 64))
    with fake_module(prepared(captures)) as (_, run):
        captured = captures.captured
        with beside:
            run()
    assert (captures.captured, captures.replayed) == (captured, 1)
    return captures, beside


def eagle_head(ends: TargetEnds, device: torch.device, rows: int, layers: int) -> tuple[EaglePass, list[EaglePiece]]:
    """A head, and one depth of as many trees."""
    with torch.device(device):
        head = EaglePass(EagleHead(ends, EagleShape(LAYER, layers=layers), TAPS), ends, "bfloat16", 64)
    pieces = []
    for _ in range(rows):
        keys = torch.empty(layers, 8, STORED + 64, 128, device=device)
        seen = torch.ones(NODES, STORED + NODES, dtype=torch.bool)
        window = WindowPiece(keys, keys, STORED, NODES, seen)
        pieces.append(EaglePiece(window, range(NODES), range(STORED, STORED + NODES), range(NODES)))
    return head, pieces


def eagle_pass(rows: int, layers: int = 1) -> KernelCounter:
    """One depth of as many trees, and the logits of its candidates."""

    def prepared(ends: TargetEnds, device: torch.device) -> Callable[[], object]:
        head, pieces = eagle_head(ends, device, rows, layers)
        features = torch.empty(rows * NODES, HIDDEN, device=device)
        return lambda: head.expand(features, pieces)

    return counted(prepared)


def block_passes(ends: TargetEnds, device: torch.device, rows: int) -> tuple[BlockPass, list[ContextWindow]]:
    """A block drafter, and the windows of as many rows."""
    with torch.device(device):
        module = BlockDrafter(ends, BlockShape(LAYER, block=NODES, layers=2, selector_rank=0), TAPS)
        passes = BlockPass(module, ends, "bfloat16")
    windows = [ContextWindow(passes.context_shape, device) for _ in range(rows)]
    for window in windows:
        window.store(0, _context(passes.context_shape, device))
    return passes, windows


def block_pass(rows: int) -> KernelCounter:
    """The blocks of as many rows."""

    def prepared(ends: TargetEnds, device: torch.device) -> Callable[[], object]:
        passes, windows = block_passes(ends, device, rows)
        return lambda: passes.draft([0] * rows, [STORED] * rows, windows)

    return counted(prepared)


def _context(shape: ContextShape, device: torch.device) -> ContextRows:
    keys = torch.empty(shape.layers, shape.kv_heads, STORED, shape.head_width, device=device)
    return ContextRows(keys, keys, torch.empty(STORED, shape.feature_size, device=device))


def test_trees_of_many_rows_take_as_many_launches_as_one() -> None:
    """The host copies twice: the tokens, and where the windows are. The candidates are read later."""
    one, many = (eagle_pass(rows) for rows in (1, 64))
    names = [[kernel.name for kernel in counter.eager()] for counter in (one, many)]
    assert names[0] == names[1]
    assert (one.copies, many.copies) == (2, 2)
    assert names[0].count("attend_windows") == names[0].count("store_windows") == 1


def test_each_layer_launches_the_same_number_of_kernels() -> None:
    """A layer's two norms each add to the residual stream as well, and one kernel computes SiLU·mul."""
    names = [[kernel.name for kernel in eagle_pass(8, layers).eager()] for layers in (1, 2, 3)]
    assert len(names[2]) - len(names[1]) == len(names[1]) - len(names[0])
    assert [one.count("normalize_rows") for one in names] == [2, 4, 6]
    assert [one.count("gate_columns") for one in names] == [1, 2, 3]
    added = [one.count("add") for one in names]
    assert added[1] - added[0] == added[2] - added[1] == 1, "queries and keys are rotated"


def test_blocks_of_many_rows_take_as_many_launches_as_one() -> None:
    one, many = (block_pass(rows) for rows in (1, 64))
    names = [[kernel.name for kernel in counter.eager()] for counter in (one, many)]
    assert names[0] == names[1]
    assert names[0].count("attend_windows") == 2
    assert one.copies == many.copies


@pytest.mark.parametrize("rows", [1, 64])
def test_a_captured_depth_is_one_copy_to_the_device_and_one_launch_beside_its_features(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The features of the parents are joined and copied in, the outputs copied out. Inside, nothing comes from the
    host, and the fake device has raised wherever it would wait."""

    def prepared(captures: Captures) -> Prepared:
        def run(ends: TargetEnds, device: torch.device) -> Callable[[], object]:
            head, pieces = eagle_head(ends, device, rows, 1)
            head.capture(captures, HIDDEN, NODES)
            features = [torch.empty(HIDDEN, device=device) for _ in range(rows * NODES)]
            return lambda: head.expand(torch.stack(features), pieces)

        return run

    captures, beside = replayed(monkeypatch, prepared)
    assert [kernel.name for kernel in beside.eager()] == ["stack", "copy_", "clone"]
    assert beside.copies == 1
    assert captures.counter.copies == 0
    sizes = [*drafting_graph_sizes(), *drafting_graph_sizes((1, 2, 4), MOST_RANKED)]
    assert captures.captured == len(sizes) == 9 + 6


@pytest.mark.parametrize("rows", [1, 64])
def test_captured_blocks_are_one_copy_to_the_device_and_one_launch_beside_their_features(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    def prepared(captures: Captures) -> Prepared:
        def run(ends: TargetEnds, device: torch.device) -> Callable[[], object]:
            passes, windows = block_passes(ends, device, rows)
            passes.capture(captures)
            return lambda: passes.draft([0] * rows, [STORED] * rows, windows)

        return run

    captures, beside = replayed(monkeypatch, prepared)
    assert [kernel.name for kernel in beside.eager()] == ["stack", "copy_"]
    assert beside.copies == 1
    assert captures.counter.copies == 0
    assert captures.captured == 2


def test_the_context_of_many_rows_is_stored_by_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of all layers, and the features; the host says once where they go."""
    counts, copied = [], list[int]()
    copy = torch._foreach_copy_

    def counted(into: list[Tensor], given: list[Tensor]) -> None:
        copied.append(len(into))
        copy(into, given)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    for rows in (1, 64):
        beside = KernelCounter()

        def prepared(ends: TargetEnds, device: torch.device, rows: int = rows) -> Callable[[], object]:
            passes, windows = block_passes(ends, device, rows)
            store = ContextStore(0, torch.bfloat16)
            start = SequenceStart(1, SamplingParameters())
            sessions = [ContextSession(start, passes.context_shape, store, device) for _ in range(rows)]
            for session, window in zip(sessions, windows, strict=True):
                session.window = window
            found = _context(passes.context_shape, device).part(0, 3)
            keys, values = (one.repeat(1, 1, rows, 1) for one in (found.keys, found.values))
            context = ContextRows(keys, values, found.features.repeat(rows, 1))
            return lambda: passes.store([(session, STORED, 3) for session in sessions], context)

        with fake_module(prepared) as (counter, run):
            counter.operations.clear()
            with beside:
                run()
            counts.append((len(counter.operations), len(beside.operations), beside.copies))
    assert counts == [(1, 0, 1)] * 2
    assert copied == [1, 64]
