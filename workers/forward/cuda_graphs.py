"""Forward passes of recurring sizes, captured once as CUDA graphs and replayed.

A decoding pass consists of hundreds of small kernels, and launching them one by one takes longer than running them.
The code does not depend on CUDA: the capture function is a parameter.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch

from workers.forward.attention import StepPlan
from workers.forward.backends.base import AttentionSetting, StepKind
from workers.forward.backends.choice import ChosenBackend, choose_backend
from workers.forward.graph_buffers import (
    DEFAULT_LIMITS,
    GraphBuffers,
    GraphLimits,
    GraphSize,
    decode_graph_sizes,
    graph_size,
)
from workers.forward.layout import RowShape
from workers.forward.loaded_model import LoadedModel, PassOutput
from workers.forward.partial_pass import WHOLE, PartialPass
from workers.ranks import AnotherRankFailed, least_of_all_ranks, try_together

logger = logging.getLogger(__name__)

_CAPTURE_AFTER = 8
_MOST_GRAPHS = 192
_WARM_ROWS = 64
_WARM_TOKENS = 2048  # most tokens of a row at warm-up; longer rows are captured when they occur

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepPlan, PartialPass], PassOutput]
"""(tokens `[1, tokens]`, positions `[1, tokens]`, selected `[selected]`, plan, parts) → output of the pass."""
Replay = Callable[[], None]
GraphCapture = Callable[[Callable[[], None]], Replay]
"""Runs a function at least once, and returns a function that repeats it on the same tensors."""


_Key = tuple[GraphSize, PartialPass]


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    buffers: GraphBuffers
    replay: Replay
    output: PassOutput  # written by each replay


class _Outcome(IntEnum):
    """What a rank says of a capture. The ranks do what the least of them says."""

    NONE_AT_ALL = 0
    """Nothing can be captured any more."""
    NOT_THIS_SIZE = 1
    CAPTURED = 2


class CudaGraphRunner:
    """Captured passes of one model over one pool. Not thread-safe."""

    def __init__(
        self,
        compute: Compute,
        capture: GraphCapture,
        setting: AttentionSetting,
        attention: ChosenBackend,
        bounds: GraphLimits = DEFAULT_LIMITS,
        capture_after: int = _CAPTURE_AFTER,
        ranks: int = 1,
    ) -> None:
        """Capture a size when it occurs for the `capture_after`th time.

        With several `ranks`, all of them run the same steps, and agree on each capture.
        """
        self._ranks = ranks
        self._compute = compute
        self._capture = capture
        self._setting = setting
        self._attention = attention
        self._bounds = bounds
        self._capture_after = capture_after
        self._blocks = 0
        """Blocks per row, fixed for all sizes, if the backend skips those that a row does not use; else 0."""
        if attention.capabilities.skips_unused_blocks:  # no row has more blocks than the pool
            self._blocks = min(bounds.longest // setting.block_size, setting.blocks)
        self._times_seen: Counter[_Key] = Counter()
        self._captured: dict[_Key, _CapturedGraph] = {}
        self._logits: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        self._refused: set[_Key] = set()
        self._given_up = False

    def run(
        self,
        rows: Sequence[RowShape],
        tokens: Sequence[int],
        positions: Sequence[int],
        selected: Sequence[int],
        partial: PartialPass = WHOLE,
    ) -> PassOutput | None:
        """Replay a step. Returns the output of at least `selected` logits, valid until the next step, or `None`."""
        block_size = self._setting.block_size
        size = graph_size(rows, len(selected), block_size, self._bounds, self._blocks)
        if size is None:
            return None
        key = size, partial
        if key not in self._captured:
            self._times_seen[key] += 1
            if self._times_seen[key] < self._capture_after or not self.capture(size, partial):
                return None
        captured = self._captured[key]
        captured.buffers.fill(rows, tokens, positions, selected)
        captured.replay()
        hidden = captured.output.hidden
        return PassOutput(captured.output.logits, None if hidden is None else hidden[: len(tokens)])

    def warm_up(self, longest: int) -> None:
        """Capture the passes of plain decoding, for sequences of up to `longest` tokens."""
        begun = time.perf_counter()
        block_size = self._setting.block_size
        sizes = decode_graph_sizes(block_size, min(longest, _WARM_TOKENS), _WARM_ROWS, self._bounds, self._blocks)
        for number, size in enumerate(sizes, start=1):
            self.capture(size)
            if self._given_up:
                return
            if size.rows == 1:
                seconds = time.perf_counter() - begun
                logger.info("captured %d of %d decoding passes in %.1f s", number, len(sizes), seconds)

    @torch.inference_mode()
    def capture(self, size: GraphSize, partial: PartialPass = WHOLE) -> bool:
        """Capture a pass of this size over padding only. Returns whether it is captured, the same on all ranks."""
        key = size, partial
        if key in self._captured:
            return True
        if self._given_up or key in self._refused or len(self._captured) >= _MOST_GRAPHS:
            return False
        found = self._attempt(size, partial)
        own = found if isinstance(found, _Outcome) else _Outcome.CAPTURED
        agreed = _Outcome(least_of_all_ranks(own, self._ranks))
        if agreed is not own:
            logger.warning("passes of %s are not captured as a CUDA graph, because another rank cannot", size)
        if agreed is _Outcome.CAPTURED and isinstance(found, _CapturedGraph):
            self._captured[key] = found
            return True
        self._refused.add(key)
        self._given_up = agreed is _Outcome.NONE_AT_ALL
        return False

    def _attempt(self, size: GraphSize, partial: PartialPass) -> _CapturedGraph | _Outcome:
        """Capture a pass on this rank. Logs why it cannot be captured."""
        setting = self._setting
        buffers = GraphBuffers(size, setting.store.kv_groups, setting.scratch, setting.device)
        buffers.fill((), (), (), ())
        try:
            example = try_together(lambda: self._pass(buffers, partial), self._ranks)
        except Exception as error:  # the compiler may raise anything
            logger.warning("passes of %s cannot be captured and run without a CUDA graph: %r", size, error)
            return _Outcome.NOT_THIS_SIZE
        output = self._output_buffers(example)

        def write() -> None:
            found = self._pass(buffers, partial)
            output.logits.copy_(found.logits)
            if output.hidden is not None and found.hidden is not None:
                output.hidden.copy_(found.hidden)

        try:
            replay = try_together(lambda: self._capture(write), self._ranks)
        except (RuntimeError, AnotherRankFailed) as error:
            logger.warning("no further passes are captured as CUDA graphs: %s", error)
            return _Outcome.NONE_AT_ALL
        return _CapturedGraph(buffers, replay, output)

    def _pass(self, buffers: GraphBuffers, partial: PartialPass) -> PassOutput:
        backend = self._attention.backend
        plan = StepPlan(backend, backend.plan_padded(buffers.step()))
        return self._compute(buffers.tokens, buffers.positions, buffers.selected, plan, partial)

    def _output_buffers(self, example: PassOutput) -> PassOutput:
        """The buffers that all captured passes write to; each result is read before the next step."""
        self._logits = _at_least(self._logits, example.logits)
        if example.hidden is None:
            return PassOutput(self._logits[: len(example.logits)])
        self._hidden = _at_least(self._hidden, example.hidden)
        return PassOutput(self._logits[: len(example.logits)], self._hidden[: len(example.hidden)])


def _at_least(buffer: torch.Tensor | None, example: torch.Tensor) -> torch.Tensor:
    """`buffer` if it has as many rows as `example`, else a new buffer."""
    return torch.empty_like(example) if buffer is None or len(buffer) < len(example) else buffer


class CudaGraphCapture:
    """Captures CUDA graphs that share one memory pool, since no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._is_proven = False

    def __call__(self, function: Callable[[], None]) -> Replay:
        """Capture the function as a CUDA graph. Raises `RuntimeError`, usually before anything is captured."""
        current = torch.cuda.current_stream(self._device)
        # The outer context restores the stream even if the capture fails.
        with torch.cuda.device(self._device), torch.cuda.stream(current):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()  # on the capture stream, since libraries allocate once per stream
                if not self._is_proven:
                    with _forbid_synchronization():
                        function()
                    self._is_proven = True
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device during the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                function()
        return graph.replay


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    """Raise `RuntimeError` inside if the host waits for the device, because that cannot be captured."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_graph_runner(model: LoadedModel, setting: AttentionSetting, compute: Compute) -> CudaGraphRunner | None:
    """A graph runner for a model that uses CUDA graphs; `None` for other models."""
    if not model.uses_cuda_graphs:
        return None
    attention = choose_backend(setting, StepKind.PADDED, model.tensor_parallel)
    return CudaGraphRunner(compute, CudaGraphCapture(model.device), setting, attention, ranks=model.tensor_parallel)
