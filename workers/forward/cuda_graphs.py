"""Forward passes of the sizes in a list, captured as CUDA graphs before the first request, and replayed.

A decoding pass consists of hundreds of small kernels, and launching them one by one takes longer than running them.
Nothing is captured while serving.
The code does not depend on CUDA: the capture function is a parameter.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from workers.forward.attention import StepPlan
from workers.forward.backends.base import AttentionBackend, AttentionSetting, StepKind
from workers.forward.backends.choice import ChosenBackend, choose_backend
from workers.forward.graph_buffers import GraphBuffers
from workers.forward.graph_sizes import (
    LONGEST,
    LONGEST_OF_FEW,
    WORD,
    GraphSize,
    gathered_graph_sizes,
    packed_graph_sizes,
    padded_graph_sizes,
    smallest_graph,
)
from workers.forward.layout import RowShape
from workers.forward.loaded_model import LoadedModel, PassOutput
from workers.forward.partial_pass import WHOLE, PartialPass
from workers.forward.recurrence.plan import RecurrenceBuffers, RecurrenceColumns, RecurrencePlan, recurrence_columns
from workers.ranks import AnotherRankFailed, least_of_all_ranks, try_together
from workers.transfer import IntegerArray, StepArray, on_host, parts_of, split_together, words_together

logger = logging.getLogger(__name__)

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepPlan, PartialPass, RecurrencePlan], PassOutput]
"""(tokens `[1, tokens]`, positions `[1, tokens]`, selected `[selected]`, plan, parts, what recurrent layers do) →
output of the pass."""
Replay = Callable[[], None]
GraphCapture = Callable[[Callable[[], None]], Replay]
"""Runs a function at least once, and returns a function that repeats it on the same tensors."""


_Key = tuple[GraphSize, PartialPass]


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    buffers: GraphBuffers | PackedBuffers
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
        sizes: Sequence[GraphSize],
        ranks: int = 1,
    ) -> None:
        """`warm_up` captures these sizes, given in ascending order. Several `ranks` agree on each capture."""
        self._ranks = ranks
        self._compute = compute
        self._capture = capture
        self._setting = setting
        self._attention = attention
        self._sizes = tuple(sizes)
        self._captured: dict[_Key, _CapturedGraph] = {}
        self._ready: dict[PartialPass, list[GraphSize]] = {}
        """The captured sizes of each part of the model, in ascending order."""
        self._logits: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        self._given_up = False

    def run(
        self,
        rows: Sequence[RowShape],
        tokens: Sequence[int],
        positions: Sequence[int] | IntegerArray,
        selected: Sequence[int],
        partial: PartialPass = WHOLE,
        recurrence: RecurrenceColumns | None = None,
    ) -> PassOutput | None:
        """Replay a step. Returns the output of at least `selected` logits, valid until the next step.

        `recurrence` is what the model's recurrent layers do, if it has some. `None`: the step fits no captured graph.
        """
        size = smallest_graph(self._ready.get(partial, ()), rows, len(selected), self._setting.block_size)
        if size is None:
            return None
        captured = self._captured[size, partial]
        captured.buffers.fill(rows, tokens, positions, selected)
        if recurrence is not None:
            captured.buffers.recurrence.fill(recurrence)
        captured.replay()
        hidden = captured.output.hidden
        return PassOutput(captured.output.logits, None if hidden is None else hidden[: len(tokens)])

    def size(self, rows: Sequence[RowShape], selected: int) -> GraphSize | None:
        """The size in which these rows run with so many logits, once it is captured; `None` if they fit none."""
        return smallest_graph(self._sizes, rows, selected, self._setting.block_size)

    def warm_up(self, partials: Iterable[PartialPass] = ()) -> None:
        """Capture all sizes, the largest first, whose memory the others use. Call this on all ranks.

        Of `partials`, with which drafts are computed, the sizes without wide rows are captured.
        """
        begun = time.perf_counter()
        keys = [(size, WHOLE) for size in self._sizes]
        keys += [(size, part) for part in partials for size in self._sizes if size.queries <= WORD]
        keys.sort(key=lambda key: key[0].order(), reverse=True)
        for size, partial in keys:
            if self._given_up:
                break
            self.capture(size, partial)
        seconds = time.perf_counter() - begun
        logger.info("captured %d of %d passes as CUDA graphs in %.1f s", len(self._captured), len(keys), seconds)

    @torch.inference_mode()
    def capture(self, size: GraphSize, partial: PartialPass = WHOLE) -> bool:
        """Capture a pass of this size over padding only. Returns whether it is captured, the same on all ranks."""
        outputs = self._logits, self._hidden
        found = self._attempt(size, partial)
        own = found if isinstance(found, _Outcome) else _Outcome.CAPTURED
        agreed = _Outcome(least_of_all_ranks(own, self._ranks))
        if agreed is not own:
            logger.warning("passes of %s are not captured as a CUDA graph, because another rank cannot", size)
        if agreed is _Outcome.CAPTURED and isinstance(found, _CapturedGraph):
            self._captured[size, partial] = found
            insort(self._ready.setdefault(partial, []), size, key=GraphSize.order)
            return True
        self._logits, self._hidden = outputs  # a smaller size needs less
        self._given_up = agreed is _Outcome.NONE_AT_ALL
        return False

    def _attempt(self, size: GraphSize, partial: PartialPass) -> _CapturedGraph | _Outcome:
        """Capture a pass on this rank. Logs why it cannot be captured."""
        refused = "passes of %s cannot be captured and run without a CUDA graph: %r"
        try:
            buffers, output = try_together(lambda: self._make_buffers(size, partial), self._ranks)
        except Exception as error:  # the compiler may raise anything
            logger.warning(refused, size, error)
            return _Outcome.NOT_THIS_SIZE

        def write() -> None:
            found = self._pass(buffers, partial)
            output.logits.copy_(found.logits)
            if output.hidden is not None and found.hidden is not None:
                output.hidden.copy_(found.hidden)

        try:
            replay = try_together(lambda: self._capture(write), self._ranks)
        except (torch.OutOfMemoryError, AnotherRankFailed) as error:  # whose rank says whether it can capture others
            logger.warning(refused, size, error)
            return _Outcome.NOT_THIS_SIZE
        except RuntimeError as error:
            logger.warning("no further passes are captured as CUDA graphs: %s", error)
            return _Outcome.NONE_AT_ALL
        return _CapturedGraph(buffers, replay, output)

    def _make_buffers(self, size: GraphSize, partial: PartialPass) -> tuple[GraphBuffers | PackedBuffers, PassOutput]:
        """The buffers of a pass of padding only, and those of its output, whose shapes a first pass shows."""
        setting = self._setting
        buffers: GraphBuffers | PackedBuffers
        if self._attention.capabilities.packs_steps:
            buffers = PackedBuffers(size, self._attention.backend, setting.device)
        else:
            buffers = GraphBuffers(size, setting.store.kv_groups, setting.scratch, setting.device)
        buffers.fill((), (), (), ())
        buffers.recurrence.fill(recurrence_columns(()))
        return buffers, self._output_buffers(self._pass(buffers, partial))

    def _pass(self, buffers: GraphBuffers | PackedBuffers, partial: PartialPass) -> PassOutput:
        backend = self._attention.backend
        if isinstance(buffers, PackedBuffers):
            plan = StepPlan(backend, buffers.metadata())
        else:
            plan = StepPlan(backend, backend.plan_padded(buffers.step()))
        recurrence = buffers.recurrence.plan
        return self._compute(buffers.tokens, buffers.positions, buffers.selected, plan, partial, recurrence)

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
        """Capture the function as a CUDA graph.

        Raises `torch.OutOfMemoryError`, after which smaller ones may be captured; `RuntimeError` for what cannot be
        captured, usually before anything is.
        """
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


def make_graph_runner(
    model: LoadedModel,
    setting: AttentionSetting,
    compute: Compute,
    attention: ChosenBackend | None,
    capture: GraphCapture | None = None,
) -> CudaGraphRunner | None:
    """A graph runner for a model that uses CUDA graphs.

    `None` for other models, for decoders that read sources, and if no layer attends.

    `attention` computes steps outside of graphs, and if it packs steps, also those inside. `capture` is CUDA's unless
    given.
    """
    if not model.uses_cuda_graphs or model.source is not None or not model.attends:
        return None
    if attention is None or not attention.capabilities.packs_steps:
        attention = choose_backend(setting, StepKind.PADDED, model.tensor_parallel)
    sizes = graph_sizes(setting, attention, model.max_context_len)
    capture = capture or CudaGraphCapture(model.device)
    return CudaGraphRunner(compute, capture, setting, attention, sizes, model.tensor_parallel)


def graph_sizes(setting: AttentionSetting, attention: ChosenBackend, longest: int) -> list[GraphSize]:
    """The sizes that are captured, in ascending order, for rows of up to `longest` tokens."""
    blocks, most_blocks = (
        min(-(-min(longest, most) // setting.block_size), setting.blocks)  # no row has more than the pool
        for most in (LONGEST, LONGEST_OF_FEW)
    )
    if attention.capabilities.packs_steps:
        return packed_graph_sizes(blocks, most_blocks)
    if attention.capabilities.skips_unused_blocks:
        return padded_graph_sizes(blocks, most_blocks)
    return gathered_graph_sizes(setting.block_size, longest)


class PackedBuffers:
    """The inputs of one graph size, for a backend that packs rows: what it plans of every step is copied into them.

    Behind the step's own tokens, rows and tiles there is padding. Padding tokens are stored in the scratch block, which
    no sequence holds, and attend to nothing. The host keeps its copy of the inputs: a step writes over the step before
    it, and pads what that had more.
    """

    def __init__(self, size: GraphSize, backend: AttentionBackend[Any], device: torch.device) -> None:
        self.size = size
        self._backend = backend
        planned = backend.plan_packed((), size)
        self._metadata = planned.metadata
        lengths = (size.tokens, size.tokens, size.selected)
        padding: list[StepArray] = [*(np.zeros(length, dtype=np.int64) for length in lengths), *planned.arrays]
        self._padding = [int(array.flat[0]) if array.size else 0 for array in padding]
        """What each part of the inputs has where it is padding."""
        self._host: IntegerArray = np.zeros(words_together(padding), dtype=np.int64)
        self._written = parts_of(self._host, padding)
        """What the last step has written of each part; before the first one, all of it."""
        self._host_parts = list(self._written)
        self._numbers = torch.zeros(len(self._host), dtype=torch.int64, device=device)
        tokens, positions, self.selected, *self._parts = split_together(self._numbers, padding)
        self.tokens, self.positions = tokens[None], positions[None]
        """`[1, tokens]`, `[1, tokens]`; `selected` is `[selected]`."""
        self.recurrence = RecurrenceBuffers(size.rows, size.tokens, device)
        """What recurrent layers do, which is filled for models that have some."""

    def fill(
        self,
        rows: Sequence[RowShape],
        tokens: Sequence[int],
        positions: Sequence[int] | IntegerArray,
        selected: Sequence[int],
    ) -> None:
        """Copy a step that fits into the buffers, in one piece. The host does not wait for the copy."""
        arrays = (tokens, positions, selected, *self._backend.plan_packed(rows, self.size).arrays)
        for index, (array, padding) in enumerate(zip(arrays, self._padding, strict=True)):
            self._written[index].fill(padding)
            part = self._host_parts[index]
            own = part[: len(array)] if part.ndim == 1 else part[tuple(map(slice, np.shape(array)))]
            own[...] = array
            self._written[index] = own
        # torch does not reuse pinned memory before the copy has finished.
        self._numbers.copy_(on_host(self._host, self._numbers.device), non_blocking=True)

    def metadata(self) -> Any:
        """The backend's metadata of what is in the buffers."""
        return self._metadata(self._parts)
