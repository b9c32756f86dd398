"""One whole step of a target on the fake device: the runner, the planned attention and the model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cluster.core.config.target_section import KvSection
from cluster.core.tree import TokenTree
from deploy.simulation.device.attention import FLOAT_BYTES, CountedAttention
from deploy.simulation.device.fake_device import Kernel, KernelCounter, fake_device
from deploy.simulation.device.models import RankModel, load
from deploy.simulation.device.recurrence import CountedRecurrences, count_recurrences
from workers.forward.backends.choice import ChosenBackend
from workers.forward.backends.triton import CAPABILITIES
from workers.forward.expert_choice import ExpertChoice
from workers.forward.experts import ExpertMatrices, FastExperts, is_mixture, matrices_of
from workers.forward.fused_layers import fuse_layers, has_known_layers
from workers.forward.layer_lists import decoder_layers
from workers.forward.linear import FastLinear, sum_outputs
from workers.forward.loaded_model import LoadedModel
from workers.forward.projections import Gated
from workers.forward.recurrent import bind_recurrent
from workers.forward.residual_product import GATED_ROWS
from workers.forward.runner import ForwardRow, ModelRunner, attention_setting
from workers.forward.triton.tiles import MOST_NORMALIZED
from workers.kv.groups import group_layers
from workers.kv.pool import KvPool

ALL_REDUCE, WAIT, GATHER = "all_reduce", "wait", "gather"
"""Beginnings and ends of sums over ranks, and what rank 0 receives of the others, among the kernels of a step in their
order."""
_MOST_SEQUENCES = 4096
"""Sequences whose recurrent states have room."""
_DIGIT_PASSES = 5
"""Passes over the logits that find the last token of top-k or top-p (`workers.sampling.triton.truncation`)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one kind."""

    count: int
    stored: int
    """Tokens whose keys and values are stored."""
    fresh: int = 1
    """Tokens to compute: the last one, or a prompt."""
    nodes: int = 0
    """Nodes of the draft, a chain."""
    top_p: bool = False


@dataclass(frozen=True, slots=True)
class StepCount:
    """What one step of one rank does."""

    sequence: tuple[Kernel, ...]
    """Launched with the layers compiled, in order, with the beginnings and ends of all-reduces."""
    layer_kernels: int
    """Launched by one layer, compiled."""
    copies: int
    """Tensors copied to the device before the step."""
    weight_bytes: int
    """Bytes of the weights that a step reads: all but the table of embeddings, and of experts those that are expected
    to be chosen."""
    kv_bytes: int
    """Bytes of the keys and values that the step has to read and write, as they are stored."""
    is_fused: bool = True
    """Whether the layers run fused, and not compiled."""
    state_bytes: int = 0
    """Bytes of the states of recurrent layers that the step has to read and write."""
    ranks: int = 1
    """Ranks of the model, each of which does this."""
    is_captured: bool = True
    """Whether the model's pass is a CUDA graph. Larger steps are none. Recurrent layers are not compiled."""
    beside: int = 0
    """Kernels that the host launches beside the graph before the decisions."""
    share: float = 1.0
    """The step's tokens as a share of those that are computed; the rest pads the graph."""

    @property
    def launches(self) -> int:
        """Kernels that are launched."""
        return len(self.kernels)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What is launched, without what ranks send each other."""
        return tuple(kernel for kernel in self.sequence if kernel.name not in (ALL_REDUCE, WAIT, GATHER))

    @property
    def all_reduces(self) -> tuple[int, ...]:
        """Bytes of each all-reduce."""
        return tuple(kernel.bytes for kernel in self.sequence if kernel.name == ALL_REDUCE)

    @property
    def bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def flops(self) -> int:
        """Operations of all kernels."""
        return sum(kernel.flops for kernel in self.kernels)


class _CountedKernels:
    """The kernels of fused layers, which are counted instead of launched."""

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter

    def normalize(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,  # noqa: ARG002 - part of the interface
    ) -> torch.Tensor:
        self._counter.add(Kernel("normalize_rows", (2 * rows.numel() + weight.numel()) * rows.element_size()))
        return torch.empty_like(rows)

    def add_and_normalize(
        self,
        rows: torch.Tensor,
        added: torch.Tensor,  # noqa: ARG002 - part of the interface
        weight: torch.Tensor,
        epsilon: float,  # noqa: ARG002
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._counter.add(Kernel("normalize_rows", (4 * rows.numel() + weight.numel()) * rows.element_size()))
        return (torch.empty_like(rows), torch.empty_like(rows)) if out is None else out

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self._counter.add(Kernel("gate_columns", 3 * gates.numel() * gates.element_size()))
        return gates.new_empty(gates.shape)

    def choose(self, logits: torch.Tensor, choice: ExpertChoice) -> tuple[torch.Tensor, torch.Tensor]:
        weights = logits.new_empty((len(logits), choice.each))
        chosen = torch.empty(weights.shape, dtype=torch.int64, device=logits.device)
        self._counter.add(Kernel("choose_experts", logits.numel() * logits.element_size() + 10 * weights.numel()))
        return weights, chosen

    def product(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,  # noqa: ARG002 - part of the interface
        *,
        follows_gate: bool,
    ) -> _CountedProduct:
        return _CountedProduct(weight, self._counter, most_gated=max(GATED_ROWS) if follows_gate else 0)

    def begin_sum(self, part: torch.Tensor) -> Callable[[], None]:
        self._counter.add(Kernel(ALL_REDUCE, part.numel() * part.element_size()))
        return lambda: self._counter.add(Kernel(WAIT, 0))


class _CountedProduct:
    """A product that adds to the residual stream, which is counted instead of launched."""

    def __init__(self, weight: torch.Tensor, counter: KernelCounter, most_gated: int) -> None:
        self._weight, self._counter, self.most_gated = weight, counter, most_gated

    def multiply(self, x: torch.Tensor | Gated) -> torch.Tensor:
        return self._weight.new_empty((self._count(x, 0), len(self._weight)))

    def add_and_normalize(
        self,
        x: torch.Tensor | Gated,
        stream: torch.Tensor,
        norm: tuple[torch.Tensor, float],  # noqa: ARG002 - part of the interface
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_one = len(stream) <= MOST_NORMALIZED
        self._count(x, 2 if is_one else 1)
        if not is_one:
            self._counter.add(Kernel("normalize_rows", 2 * stream.numel() * stream.element_size()))
        return torch.empty_like(stream), torch.empty_like(stream)

    def _count(self, x: torch.Tensor | Gated, others: int) -> int:
        """Count the product, and that many more readings or writings of its results. Returns the number of rows."""
        outputs, inputs = self._weight.shape
        rows, read = (x.tokens, 2 * inputs) if isinstance(x, Gated) else (len(x), inputs)
        numbers = self._weight.numel() + rows * (read + (1 + others) * outputs)
        self._counter.add(Kernel("multiply_splits", numbers * self._weight.element_size(), 2 * rows * outputs * inputs))
        return rows


class _CountedExperts:
    """The kernels of the experts of a layer, which are counted instead of launched."""

    def __init__(self, matrices: ExpertMatrices, number_bytes: float, counter: KernelCounter) -> None:
        self._matrices, self._number_bytes, self._counter = matrices, number_bytes, counter
        self.read = 0
        """Bytes of the matrices that a step reads."""

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        rows = self._multiply(x, chosen)
        self._counter.add(Kernel("add_rows", (rows * x.shape[1] + x.numel()) * x.element_size()))
        return torch.empty_like(x)

    def _multiply(self, x: torch.Tensor, chosen: torch.Tensor) -> int:
        """Count the routing and the products. Returns the number of rows of all experts."""
        matrices, rows, element = self._matrices, chosen.numel(), x.element_size()
        experts = len(matrices.first)
        share = 1 - (1 - chosen.shape[1] / experts) ** len(chosen)  # of the experts: each token chooses by itself
        self._counter.add(Kernel("route_expert", 16 * rows))
        for matrix, inputs in ((matrices.first, x.numel()), (matrices.second, rows * matrices.second.shape[2])):
            read = int(share * matrix.numel() * self._number_bytes)
            outputs = matrices.second.shape[2] if matrix is matrices.first else matrix.shape[1]
            flops = 2 * rows * matrix.shape[1] * matrix.shape[2]
            self._counter.add(Kernel("multiply_tiles", read + (inputs + rows * outputs) * element, flops))
            self.read += read
        return rows


class _CountedStreamExperts(_CountedExperts):
    """Experts that add to the residual stream, as they do where no ranks sum theirs before."""

    def mix_add_and_normalize(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,  # noqa: ARG002 - part of the interface
        stream: torch.Tensor,
        norm: tuple[torch.Tensor, float],  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._multiply(x, chosen)
        numbers = rows * x.shape[1] + 3 * x.numel()
        self._counter.add(Kernel("add_rows_and_normalize", numbers * x.element_size()))
        return torch.empty_like(stream), torch.empty_like(stream)


def count_step(model: RankModel, rows: Sequence[Rows]) -> StepCount:
    """Run a step of one rank on the fake device, decisions included, and count what it does.

    Every step attends by the Triton kernels. A step that fits a CUDA graph is counted as it is captured, padding
    included, and then replayed.
    Raises what PyTorch raises where a tensor is on the wrong device or the host would wait.
    """
    with fake_device() as device:
        loaded, weight_bytes = load(model, device)
        loaded = replace(loaded, uses_cuda_graphs=True)
        section = KvSection(block_size=16, dtype=model.kv_dtype, sequences=_MOST_SEQUENCES, prefix_cache=False)
        tokens = sum(kind.count * (kind.stored + kind.fresh + kind.nodes + section.block_size) for kind in rows)
        tables = group_layers(loaded.kv_spec, section, truncatable=False).layout.tables
        pool = KvPool(loaded.kv_spec, section, -(-tokens // section.block_size) * tables)
        pass_ = _CountedPass(model, loaded, pool)
        counter, runner = pass_.counter, pass_.runner
        is_fused = not loaded.states and fuse_layers(loaded.module, _CountedKernels(counter))
        if (recurrent := bind_recurrent(loaded.module)) is not None:
            longest = max(kind.fresh + kind.nodes for kind in rows)
            moves = sum(kind.count * (2 + kind.nodes) for kind in rows)  # before, after the tokens, after each node
            count_recurrences(recurrent, CountedRecurrences(counter, longest, moves))
        batch = [row for kind in rows for row in _forward_rows(pool, kind)]
        pass_.attention.rows = shapes = [row.shape for row in batch]
        width = sum(row.width for row in shapes)
        size = None if runner.graphs is None else runner.graphs.size(shapes, sum(len(row.select) for row in batch))
        beside = KernelCounter()
        if runner.graphs is None or size is None:
            pass_.count(lambda: runner.forward(batch))
        else:
            runner.graphs.capture(size)
            with beside:
                runner.forward(batch)
        outputs = loaded.module.get_output_embeddings()
        selected = sum(len(row.select) for row in batch)
        logits = torch.empty((selected, outputs.out_features), dtype=loaded.dtype, device=device)
        counter.add(*_decisions(logits, rows, model.ranks))
        is_compiled = not loaded.states
        return StepCount(
            sequence=tuple(counter.fused() if is_compiled else counter.eager()),
            layer_kernels=_usual_layer(counter, pass_.begins, is_compiled),
            copies=counter.copies + beside.copies,
            weight_bytes=weight_bytes + sum(one.read for one in pass_.experts),
            kv_bytes=pass_.attention.kv_bytes,
            is_fused=is_fused,
            state_bytes=0 if pool.states is None else pool.states.size * _state_moves(rows),
            is_captured=size is not None,
            beside=len(beside.operations),
            share=1.0 if size is None else width / size.tokens,
            ranks=model.ranks,
        )


class _CountedPass:
    """A runner whose passes are counted. It stands for the capture of CUDA graphs: a replay launches nothing."""

    def __init__(self, model: RankModel, loaded: LoadedModel, pool: KvPool) -> None:
        self.counter = KernelCounter()
        self.attention = CountedAttention(attention_setting(loaded, pool), self.counter)
        self.runner = ModelRunner(
            loaded, pool, attention=ChosenBackend("triton", self.attention, CAPABILITIES), capture=self.capture
        )
        self.experts = _count_experts(loaded.module, model, self.counter)
        _sum_outputs(loaded.module, model)
        self.begins: list[int] = []
        """The number of operations before each layer."""
        self._model, self._module = model, loaded.module

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.count(function)
        return lambda: None

    def count(self, function: Callable[[], object]) -> None:
        """Call the function, and count what it launches in place of what was launched before."""
        self.attention.kv_bytes = 0
        self.counter.operations.clear()
        for one in self.experts:
            one.read = 0
        counter = self.counter
        with _all_reduces(self._module, self._model, counter), _regions(self._module, counter) as self.begins, counter:
            function()


def _state_moves(rows: Sequence[Rows]) -> int:
    """States that a step has to read and write: one of each row after its tokens, and the one before, if any."""
    return sum(kind.count * (1 + bool(kind.stored)) for kind in rows)


def _count_experts(module: nn.Module, model: RankModel, counter: KernelCounter) -> list[_CountedExperts]:
    """Replace the experts of all layers by kernels that are counted."""
    found: list[_CountedExperts] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if is_mixture(child):
                if (matrices := matrices_of(child)) is None:
                    raise RuntimeError(f"{type(child).__name__} is not multiplied by the kernels")
                kind = _CountedExperts if model.ranks > 1 else _CountedStreamExperts
                found.append(kind(matrices, model.expert_bytes, counter))
                setattr(parent, name, FastExperts(found[-1]))
    return found


@contextmanager
def _regions(module: nn.Module, counter: KernelCounter) -> Iterator[list[int]]:
    """Inside, each decoder layer is a region of its own. Yields the number of operations before each layer."""
    begins: list[int] = []

    def begin(*_: Any) -> None:
        begins.append(len(counter.operations))
        counter.region = len(begins)

    def end(*_: Any) -> None:
        counter.region = 0

    with ExitStack() as stack:
        for layer in decoder_layers(module):
            stack.callback(layer.register_forward_pre_hook(begin).remove)
            stack.callback(layer.register_forward_hook(end).remove)
        yield begins


def _usual_layer(counter: KernelCounter, begins: Sequence[int], is_compiled: bool) -> int:
    """Kernels of the last layer but one, which is like most."""
    layer = KernelCounter()
    layer.operations = counter.operations[begins[-2] : begins[-1]]
    kernels = layer.fused() if is_compiled else layer.eager()
    return sum(kernel.name not in (ALL_REDUCE, WAIT) for kernel in kernels)


def _forward_rows(pool: KvPool, kind: Rows) -> Iterator[ForwardRow]:
    for _ in range(kind.count):
        table = pool.new_table()
        if kind.stored:
            pool.reserve(table, kind.stored)
            if pool.states is not None:
                pool.states.assume(table.states)
            pool.commit(table, (0,) * kind.stored)
        tree = TokenTree.chain(range(kind.nodes))
        select = tuple(range(kind.fresh - 1, kind.fresh + kind.nodes))
        row = ForwardRow(table, (0,) * kind.fresh, tree, select)
        pool.reserve(table, row.end, len(tree))
        yield row


_SUMMED = ("o_proj", "down_proj")
"""Products whose outputs the ranks sum, after each attention and each feed-forward network."""


def _sum_outputs(module: nn.Module, model: RankModel) -> None:
    """Let the ranks sum the outputs of products, where layers are fused."""
    for name, part in module.named_modules():
        if model.ranks > 1 and name.endswith(_SUMMED) and isinstance(part, FastLinear) and has_known_layers(module):
            sum_outputs(part)


@contextmanager
def _all_reduces(module: nn.Module, model: RankModel, counter: KernelCounter) -> Iterator[None]:
    """Inside, record the sums over all ranks that follow modules, which fused layers do not call."""

    def record(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        counter.add(Kernel(ALL_REDUCE, output.numel() * output.element_size()), Kernel(WAIT, 0))

    summed = (".experts", *(name for name in _SUMMED if name != "o_proj" or model.shares_heads))
    with ExitStack() as stack:
        for name, part in module.named_modules():
            if model.ranks > 1 and name.endswith(summed):
                stack.callback(part.register_forward_hook(record).remove)
        yield


def _decisions(logits: torch.Tensor, rows: Sequence[Rows], ranks: int) -> Iterator[Kernel]:
    """What the first of some ranks does to decide, with logits `[decisions, vocabulary (this rank's part)]`.

    For rows with top-p it gathers the logits of all ranks and samples from the whole vocabulary. The other ranks wait
    for the tokens, which hosts send. For the other rows each rank finds its best scores and tokens, which all exchange.
    """
    (count, size), element = logits.shape, logits.element_size()
    truncated = sum(kind.count * (1 + kind.nodes) for kind in rows if kind.top_p)
    if ranks == 1:
        yield from _samples(count, truncated, size * element)
        return
    if count > truncated:
        yield from _samples(count - truncated, 0, size * element)
        yield from (Kernel(ALL_REDUCE, (count - truncated) * 2 * 8), Kernel(WAIT, 0))
    if truncated:
        yield Kernel(GATHER, truncated * size * element * (ranks - 1))
        yield Kernel("cat", 2 * truncated * size * element * ranks)
        yield from _samples(truncated, truncated, size * element * ranks)


def _samples(count: int, truncated: int, row_bytes: int) -> Iterator[Kernel]:
    """The kernels of `workers.sampling.triton` for sampled rows, some of them with top-p."""
    read, parts = count * row_bytes, count * -(-row_bytes // (2 * 4096)) * 2 * FLOAT_BYTES
    if truncated:
        yield Kernel("largest_logits", truncated * row_bytes)
        for _ in range(_DIGIT_PASSES):
            yield Kernel("sum_digits", truncated * row_bytes)
            yield Kernel("choose_digits", truncated * 2048 * 2 * 8)
    yield Kernel("best_of_tiles", read + parts)
    yield Kernel("join_tiles", parts)
