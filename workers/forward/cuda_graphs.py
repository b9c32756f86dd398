"""Steps of recurring sizes, recorded once and replayed: a GPU starts a whole pass as one piece.

A decoding pass is hundreds of small kernels, and starting them one by one takes longer than they do. The machinery
is the same wherever it runs; what records is given to it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from cluster.core.ids import BlockId
from workers.forward.flex_attention import Flex
from workers.forward.flex_trial import verified_flex_attention
from workers.forward.graph_buffers import (
    DEFAULT_LIMITS,
    GraphBuffers,
    GraphLimits,
    GraphSize,
    decode_graph_sizes,
    graph_size,
)
from workers.forward.layout import RowShape, StepLayout
from workers.forward.loaded_model import LoadedModel
from workers.kv.groups import KvCacheGroups
from workers.kv.pool import KvPool

logger = logging.getLogger(__name__)

_CAPTURE_AFTER = 8
_MOST_GRAPHS = 192
_WARM_ROWS = 64
_WARM_TOKENS = 2048  # of a row; longer ones are recorded when they are met

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepLayout], torch.Tensor]
"""Tokens `[1, tokens]`, positions `[1, tokens]`, selected tokens `[selected]` and layout → logits `[selected, …]`."""
Replay = Callable[[], None]
GraphCapture = Callable[[Callable[[], None]], Replay]
"""Runs a function at least once and returns what does the same again, on the same tensors."""


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    frame: GraphBuffers
    replay: Replay
    logits: torch.Tensor  # [selected, vocabulary], written by each replay


class CudaGraphRunner:
    """Recorded passes of one model over one pool. One at a time, always from the same thread."""

    def __init__(
        self,
        compute: Compute,
        record: GraphCapture,
        kv_groups: KvCacheGroups,
        scratch: BlockId,
        device: torch.device,
        bounds: GraphLimits = DEFAULT_LIMITS,
        capture_after: int = _CAPTURE_AFTER,
        choose_flex: Callable[[], Flex | None] = lambda: None,
    ) -> None:
        """A size is recorded when it is met for the `capture_after`th time; `scratch` is a block that no sequence owns.

        `choose_flex` is asked before the first recording, in the warm-up if there is one.
        """
        self._compute = compute
        self._record = record
        self._kv_groups = kv_groups
        self._scratch = scratch
        self._device = device
        self._bounds = bounds
        self._capture_after = capture_after
        self._choose_flex = choose_flex
        self._flex: Flex | None = None
        self._blocks = 0
        """Of every row, where attention reads the pool as it lies and skips what a row does not use."""
        self._has_chosen = False
        self._times_seen: Counter[GraphSize] = Counter()
        self._captured: dict[GraphSize, _CapturedGraph] = {}
        self._logits: torch.Tensor | None = None
        self._refused: set[GraphSize] = set()
        self._given_up = False

    def run(
        self, rows: Sequence[RowShape], tokens: Sequence[int], positions: Sequence[int], selected: Sequence[int]
    ) -> torch.Tensor | None:
        """Logits `[≥ selected, vocabulary]` of the step, until the next one; `None` where it is not for replaying."""
        self._choose()
        block_size = self._kv_groups.layout.block_size
        size = graph_size(rows, len(selected), block_size, self._bounds, self._blocks)
        if size is None:
            return None
        if size not in self._captured:
            self._times_seen[size] += 1
            if self._times_seen[size] < self._capture_after or not self.prepare(size):
                return None
        recording = self._captured[size]
        recording.frame.fill(rows, tokens, positions, selected)
        recording.replay()
        return recording.logits

    def warm_up(self, longest: int) -> None:
        """Record the passes of plain decoding, for sequences of up to `longest` tokens."""
        begun = time.perf_counter()
        self._choose()
        block_size = self._kv_groups.layout.block_size
        sizes = decode_graph_sizes(block_size, min(longest, _WARM_TOKENS), _WARM_ROWS, self._bounds, self._blocks)
        for number, size in enumerate(sizes, start=1):
            self.prepare(size)
            if self._given_up:
                return
            if size.rows == 1:
                seconds = time.perf_counter() - begun
                logger.info("recorded %d of %d passes of decoding in %.1f s", number, len(sizes), seconds)

    @torch.inference_mode()
    def prepare(self, size: GraphSize) -> bool:
        """Record a pass of this size, over nobody's tokens. False where that cannot be."""
        if size in self._captured:
            return True
        if self._given_up or size in self._refused or len(self._captured) >= _MOST_GRAPHS:
            return False
        frame = GraphBuffers(size, self._kv_groups, self._scratch, self._device, self._flex)
        frame.fill((), (), (), ())
        try:
            example = self._pass(frame)
        except Exception as error:  # compilers raise whatever they meet
            self._refused.add(size)
            logger.warning("passes of %s cannot be made and run without a frame: %r", size, error)
            return False
        logits = self._logits_buffer(size.selected, example)

        def write() -> None:
            logits.copy_(self._pass(frame))

        try:
            self._captured[size] = _CapturedGraph(frame, self._record(write), logits)
        except RuntimeError as error:
            self._given_up = True
            logger.warning("no further passes are recorded, they are started kernel by kernel: %s", error)
            return False
        return True

    def _choose(self) -> None:
        if not self._has_chosen:
            self._has_chosen = True
            self._flex = self._choose_flex()
            if self._flex is not None:  # no row has more blocks than the pool
                self._blocks = min(self._bounds.longest // self._kv_groups.layout.block_size, self._scratch)

    def _pass(self, frame: GraphBuffers) -> torch.Tensor:
        return self._compute(frame.tokens, frame.positions, frame.selected, frame.layout())

    def _logits_buffer(self, selected: int, example: torch.Tensor) -> torch.Tensor:
        """Where the logits are left: all recordings share it, since a result is read before the next step."""
        if self._logits is None or len(self._logits) < selected:
            self._logits = example.new_empty(selected, *example.shape[1:])
        return self._logits[:selected]


class CudaGraphCapture:
    """CUDA graphs that share one memory pool: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._is_proven = False

    def __call__(self, function: Callable[[], None]) -> Replay:
        """See `GraphCapture`. Raises `RuntimeError`, as a rule before anything is recorded."""
        current = torch.cuda.current_stream(self._device)
        # The outer context restores the stream also where recording fails.
        with torch.cuda.device(self._device), torch.cuda.stream(current):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()  # on the stream of the recording: libraries allocate per stream, once
                if not self._is_proven:
                    with _forbid_synchronization():
                        function()
                    self._is_proven = True
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                function()
        return graph.replay


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    """Where the host would wait for the device it raises `RuntimeError` instead: that cannot be recorded."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_graph_runner(model: LoadedModel, pool: KvPool, compute: Compute) -> CudaGraphRunner | None:
    """For a model whose passes are replayed; `None` for others."""
    if not model.uses_cuda_graphs:
        return None
    return CudaGraphRunner(
        compute,
        CudaGraphCapture(model.device),
        pool.kv_groups,
        pool.scratch,
        model.device,
        choose_flex=partial(verified_flex_attention, model, pool),
    )
