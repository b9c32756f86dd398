"""One whole step of a target on the fake device: the runner, the planned attention and the model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from cluster.core.config.target_section import EvidenceSection, KvSection
from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import Verdict, VerifyRow
from deploy.simulation.device.attention import CountedAttention, LayerAttention
from deploy.simulation.device.decisions import ALL_GATHER, GATHER, CountedCopies, count_decisions
from deploy.simulation.device.fake_device import Kernel, KernelCounter, fake_device
from deploy.simulation.device.kernels import ALL_REDUCE, WAIT, CountedExperts, CountedKernels, CountedStreamExperts
from deploy.simulation.device.models import RankModel, load
from deploy.simulation.device.recurrence import CountedRecurrences, count_recurrences
from workers.forward.backends.choice import ChosenBackend
from workers.forward.backends.triton import CAPABILITIES
from workers.forward.experts import FastExperts, is_mixture, matrices_of
from workers.forward.fused_layers import fuse_layers, has_known_layers
from workers.forward.layer_lists import decoder_layers
from workers.forward.linear import FastLinear, sum_outputs
from workers.forward.loaded_model import LoadedModel
from workers.forward.recurrent import bind_recurrent
from workers.forward.runner import ForwardRow, ModelRunner, attention_setting
from workers.kv.groups import group_layers
from workers.kv.pool import KvPool
from workers.sampling.acceptance import Accepted
from workers.sampling.context import RowDecisions
from workers.transfer import HostCopies
from workers.verify.decider import Decider
from workers.verify.evidence import EvidenceCollector

_SENT = (ALL_REDUCE, WAIT, ALL_GATHER, GATHER)
"""What ranks send each other, among the kernels of a step."""
_MOST_SEQUENCES = 4096
"""Sequences whose recurrent states have room."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one kind."""

    count: int
    stored: int
    """Tokens whose keys and values are stored."""
    fresh: int = 1
    """Tokens to compute: the last one, or a prompt."""
    nodes: int = 0
    """Nodes of the draft."""
    top_p: bool = False
    has_penalty: bool = False
    """Whether tokens of the answer, which are all, change their own logits."""
    branches: bool = False
    """Whether the draft is another token beside a chain, which is accepted in its place; otherwise it is a chain."""

    @property
    def tree(self) -> TokenTree:
        """The draft."""
        chain = TokenTree.chain(range(self.nodes))
        return TokenTree(chain.tokens, (-1, -1, *range(1, self.nodes - 1))) if self.branches else chain

    @property
    def accepted(self) -> range:
        """The nodes that are accepted: all, or all of the chain."""
        return range(int(self.branches), self.nodes)

    def decisions(self) -> RowDecisions:
        """What decides one of the rows: sampled, with noise."""
        sampling = SamplingParameters(
            temperature=0.7, top_p=0.95 if self.top_p else 1.0, presence_penalty=0.5 if self.has_penalty else 0.0
        )
        return RowDecisions(sampling, range(self.stored + self.fresh), 0, self.tree)


@dataclass(frozen=True, slots=True)
class StepCount:
    """What one step of one rank does."""

    sequence: tuple[Kernel, ...]
    """Launched by the model's pass with the layers compiled, in order, with the beginnings and ends of all-reduces."""
    layer_kernels: int
    """Launched by one layer, compiled."""
    copies: int
    """Tensors copied to the device before the pass."""
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
    decisions: tuple[Kernel, ...] = ()
    """Launched to decide, after the pass, with what ranks send each other."""
    moves: tuple[Kernel, ...] = ()
    """Launched to move the keys and values of accepted nodes, after the decisions."""
    waits: int = 0
    """Times that the host waits for the device."""
    read_bytes: int = 0
    """Bytes copied to the host: tokens, and hidden states at all nodes if there are few, else at accepted ones."""
    shown: tuple[Kernel, ...] = ()
    """Launched to copy hidden states to the host."""
    attention: tuple[LayerAttention, ...] = ()
    """That of each layer that attends."""
    shown_bytes: int = 0
    """Bytes of the hidden states at accepted positions, which a drafting module on the device reads."""

    @property
    def launches(self) -> int:
        """Kernels that are launched."""
        return len(self.kernels)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What is launched, without what ranks send each other."""
        launched = (*self.sequence, *self.decisions, *self.moves, *self.shown)
        return tuple(kernel for kernel in launched if kernel.name not in _SENT)

    @property
    def all_reduces(self) -> tuple[int, ...]:
        """Bytes of each all-reduce."""
        return tuple(kernel.bytes for kernel in self.sequence if kernel.name == ALL_REDUCE)

    @property
    def bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def needed_bytes(self) -> int:
        """Bytes of the weights, keys, values and recurrent states that the step has to read and write."""
        return self.weight_bytes + self.kv_bytes + self.state_bytes

    @property
    def flops(self) -> int:
        """Operations of all kernels."""
        return sum(kernel.flops for kernel in self.kernels)


def count_step(model: RankModel, rows: Sequence[Rows], taps: tuple[int, ...] = ()) -> StepCount:
    """Run a step of one rank on the fake device, decisions included, and count what it does.

    With `taps` the host reads hidden states after these layers at accepted positions.
    Every step attends by the Triton kernels. A step that fits a CUDA graph is counted as it is captured, padding
    included, and then replayed. The host is told numbers that count from 0, whatever it reads.
    Raises what PyTorch raises where a tensor is on the wrong device or the host would wait.
    """
    with fake_device() as device:
        loaded, weight_bytes = load(model, device)
        loaded = replace(loaded, uses_cuda_graphs=True)
        section = KvSection(block_size=16, dtype=model.kv_dtype, sequences=_MOST_SEQUENCES, prefix_cache=False)
        tokens = sum(kind.count * (kind.stored + kind.fresh + kind.nodes + section.block_size) for kind in rows)
        tables = group_layers(loaded.kv_spec, section, truncatable=False).layout.tables
        moved = KernelCounter()
        pool = KvPool(loaded.kv_spec, section, -(-tokens // section.block_size) * tables, kernels=CountedCopies(moved))
        pass_ = _CountedPass(model, loaded, pool, taps)
        counter, runner = pass_.counter, pass_.runner
        is_fused = not loaded.states and fuse_layers(loaded.module, CountedKernels(counter))
        if (recurrent := bind_recurrent(loaded.module)) is not None:
            longest = max(kind.fresh + kind.nodes for kind in rows)
            moves = sum(kind.count * (2 + kind.nodes) for kind in rows)  # before, after the tokens, after each node
            count_recurrences(recurrent, CountedRecurrences(counter, longest, moves))
        batch = [(row, kind) for kind in rows for row in _forward_rows(pool, kind)]
        logits, beside, share = pass_.run([row for row, _ in batch])
        shown, evidence = KernelCounter(), _ShownStates(runner, taps, batch)
        rows_decided = (kind.decisions() for _, kind in batch)
        decided = count_decisions(loaded, model.ranks, logits, rows_decided, partial(evidence.launch, logits))
        with shown:
            for index, (_, kind) in enumerate(batch):
                evidence.collect(index, kind.accepted)
            shown_bytes = evidence.complete()
        with moved, pool.moving_together():
            for row, kind in batch:
                runner.commit(row, kind.accepted)
        is_compiled = not loaded.states
        return StepCount(
            sequence=tuple(counter.fused() if is_compiled else counter.eager()),
            layer_kernels=_usual_layer(counter, pass_.begins, is_compiled),
            copies=counter.copies + beside.copies,
            decisions=decided.kernels,
            moves=tuple(moved.eager()),
            waits=counter.waits + beside.waits + decided.waits + moved.waits + shown.waits,
            read_bytes=decided.read_bytes + shown.read_bytes,
            shown=tuple(shown.eager()),
            shown_bytes=shown_bytes,
            weight_bytes=weight_bytes + sum(one.read for one in pass_.experts),
            kv_bytes=pass_.attention.kv_bytes,
            attention=tuple(pass_.attention.layers),
            is_fused=is_fused,
            state_bytes=0 if pool.states is None else pool.states.size * _state_moves(rows),
            is_captured=share is not None,
            beside=len(beside.operations),
            share=share or 1.0,
            ranks=model.ranks,
        )


class _CountedPass:
    """A runner whose passes are counted. It stands for the capture of CUDA graphs: a replay launches nothing."""

    def __init__(self, model: RankModel, loaded: LoadedModel, pool: KvPool, taps: tuple[int, ...] = ()) -> None:
        self.counter = KernelCounter()
        self.attention = CountedAttention(attention_setting(loaded, pool), self.counter)
        self.runner = ModelRunner(
            loaded, pool, taps, ChosenBackend("triton", self.attention, CAPABILITIES), capture=self.capture
        )
        self.experts = _count_experts(loaded.module, model, self.counter)
        _sum_outputs(loaded.module, model)
        self.begins: list[int] = []
        """The number of operations before each layer."""
        self._model, self._module = model, loaded.module

    def run(self, batch: Sequence[ForwardRow]) -> tuple[torch.Tensor, KernelCounter, float | None]:
        """Compute the rows. Returns their logits, and what is launched and copied beside a graph.

        The last is the share of the graph's tokens that the rows have; `None` where they fit no graph.
        """
        runner, beside, found = self.runner, KernelCounter(), list[torch.Tensor]()
        self.attention.rows = shapes = [row.shape for row in batch]
        selected = sum(len(row.select) for row in batch)
        size = None if runner.graphs is None else runner.graphs.size(shapes, selected)
        if runner.graphs is None or size is None:
            self.count(lambda: found.append(runner.forward(batch)))
            return found[0], beside, None
        runner.graphs.capture(size)
        with beside:
            logits = runner.forward(batch)
        return logits, beside, sum(row.width for row in shapes) / size.tokens

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.count(function)
        return lambda: None

    def count(self, function: Callable[[], object]) -> None:
        """Call the function, and count what it launches in place of what was launched before."""
        self.attention.kv_bytes = 0
        self.attention.layers.clear()
        self.counter.operations.clear()
        for one in self.experts:
            one.read = 0
        counter = self.counter
        with _all_reduces(self._module, self._model, counter), _regions(self._module, counter) as self.begins, counter:
            function()


class _ShownStates:
    """The hidden states that the host reads of a step, by the collector of targets that serve; nothing without taps."""

    def __init__(self, runner: ModelRunner, taps: tuple[int, ...], batch: Sequence[tuple[ForwardRow, Rows]]) -> None:
        self._runner, self._section = runner, EvidenceSection(taps=taps)
        is_asked = DraftBudget(max_nodes=1, max_depth=1)
        self._rows = [
            VerifyRow(SequenceId(f"s{index}"), kind.stored + kind.fresh, row.tokens, row.tree, next_budget=is_asked)
            for index, (row, kind) in enumerate(batch)
        ]
        ends = accumulate(len(row.select) for row, _ in batch)
        self._owns = [range(end - len(row.select), end) for end, (row, _) in zip(ends, batch, strict=True)]
        self._collector: EvidenceCollector | None = None
        self._verdicts: dict[SequenceId, Verdict] = {}

    def launch(self, logits: torch.Tensor, decider: Decider, copies: HostCopies) -> None:
        """Launch what arrives with the decisions."""
        if self._section.any:
            self._collector = EvidenceCollector(self._section, self._runner, decider, is_alone=True)
            self._collector.launch(self._rows, self._owns, logits, copies)

    def collect(self, index: int, nodes: Sequence[int]) -> None:
        """Take those of a row, of whose tree these nodes are accepted."""
        if self._collector is not None:
            row, accepted = self._rows[index], Accepted(tuple(nodes), (0,) * (len(nodes) + 1))
            evidence = self._collector.collect(index, row, accepted, (), torch.empty(0))
            self._verdicts[row.sequence_id] = Verdict(row.sequence_id, row.base_len, evidence=evidence)

    def complete(self) -> int:
        """Read what did not arrive with the decisions. Returns the bytes of all that were taken."""
        if self._collector is not None:
            self._collector.complete(self._verdicts)
        found = (verdict.evidence for verdict in self._verdicts.values())
        return sum(len(one.hidden.data) for one in found if one is not None and one.hidden is not None)


def _state_moves(rows: Sequence[Rows]) -> int:
    """States that a step has to read and write: one of each row after its tokens, and the one before, if any."""
    return sum(kind.count * (1 + bool(kind.stored)) for kind in rows)


def _count_experts(module: nn.Module, model: RankModel, counter: KernelCounter) -> list[CountedExperts]:
    """Replace the experts of all layers by kernels that are counted."""
    found: list[CountedExperts] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if is_mixture(child):
                if (matrices := matrices_of(child)) is None:
                    raise RuntimeError(f"{type(child).__name__} is not multiplied by the kernels")
                kind = CountedExperts if model.ranks > 1 else CountedStreamExperts
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
        tree = kind.tree
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
