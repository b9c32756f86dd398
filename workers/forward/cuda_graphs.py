"""A target's forward passes of the sizes in a list, captured as CUDA graphs (`workers.forward.captured_passes`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from workers.forward.attention import StepPlan
from workers.forward.backends.base import AttentionBackend, AttentionSetting, StepKind
from workers.forward.backends.choice import ChosenBackend, choose_backend
from workers.forward.captured_passes import CapturedPasses, CudaGraphCapture, GraphCapture
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
from workers.transfer import IntegerArray, StepArray, on_host, parts_of, split_together, words_together

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepPlan, PartialPass, RecurrencePlan], PassOutput]
"""(tokens `[1, tokens]`, positions `[1, tokens]`, selected `[selected]`, plan, parts, what recurrent layers do) →
output of the pass."""
_Buffers: TypeAlias = "GraphBuffers | PackedBuffers"


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
        self._compute = compute
        self._setting = setting
        self._attention = attention
        self._sizes = tuple(sizes)
        self.passes: CapturedPasses[GraphSize, PartialPass, _Buffers] = CapturedPasses(
            self._make_buffers, self._outputs, capture, ranks
        )

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
        size = smallest_graph(self.passes.sizes(partial), rows, len(selected), self._setting.block_size)
        if size is None:
            return None
        captured = self.passes.captured[size, partial]
        captured.inputs.fill(rows, tokens, positions, selected)
        if recurrence is not None:
            captured.inputs.recurrence.fill(recurrence)
        captured.replay()
        logits, *hidden = captured.outputs
        return PassOutput(logits, hidden[0][: len(tokens)] if hidden else None)

    def size(self, rows: Sequence[RowShape], selected: int) -> GraphSize | None:
        """The size in which these rows run with so many logits, once it is captured; `None` if they fit none."""
        return smallest_graph(self._sizes, rows, selected, self._setting.block_size)

    def warm_up(self, partials: Iterable[PartialPass] = ()) -> None:
        """Capture all sizes. Call this on all ranks.

        Of `partials`, with which drafts are computed, the sizes without wide rows are captured.
        """
        keys = [(size, WHOLE) for size in self._sizes]
        keys += [(size, part) for part in partials for size in self._sizes if size.queries <= WORD]
        self.passes.capture_all(keys)

    def capture(self, size: GraphSize, partial: PartialPass = WHOLE) -> bool:
        """Capture a pass of this size over padding only. Returns whether it is captured, the same on all ranks."""
        return self.passes.capture(size, partial)

    def _make_buffers(self, size: GraphSize) -> _Buffers:
        """The buffers of a pass of padding only."""
        setting = self._setting
        buffers: _Buffers
        if self._attention.capabilities.packs_steps:
            buffers = PackedBuffers(size, self._attention.backend, setting.device)
        else:
            buffers = GraphBuffers(size, setting.store.kv_groups, setting.scratch, setting.device)
        buffers.fill((), (), (), ())
        buffers.recurrence.fill(recurrence_columns(()))
        return buffers

    def _outputs(self, buffers: _Buffers, partial: PartialPass) -> list[torch.Tensor]:
        """The logits, and the hidden states if they are recorded."""
        output = self._pass(buffers, partial)
        return [output.logits] if output.hidden is None else [output.logits, output.hidden]

    def _pass(self, buffers: _Buffers, partial: PartialPass) -> PassOutput:
        backend = self._attention.backend
        if isinstance(buffers, PackedBuffers):
            plan = StepPlan(backend, buffers.metadata())
        else:
            plan = StepPlan(backend, backend.plan_padded(buffers.step()))
        recurrence = buffers.recurrence.plan
        return self._compute(buffers.tokens, buffers.positions, buffers.selected, plan, partial, recurrence)


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
