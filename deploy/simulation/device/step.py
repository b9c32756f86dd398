"""One whole step of a target on the fake device: the runner, the planned attention and the model's own modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cluster.core.config.model_section import PoolSection
from cluster.core.tree import TokenTree
from deploy.simulation.device.fake_device import Kernel, KernelCounter, fake_device
from deploy.simulation.device.models import RankModel, load
from workers.forward.backends.base import AttentionSetting
from workers.forward.backends.choice import ChosenBackend
from workers.forward.backends.triton import CAPABILITIES, TritonBackend, TritonStep
from workers.forward.fused_layers import fuse_layers
from workers.forward.layer_lists import decoder_layers
from workers.forward.layout import RowShape
from workers.forward.projections import Projections
from workers.forward.runner import ForwardRow, ModelRunner, attention_setting
from workers.forward.triton.tiles import wide_tile
from workers.kv.pool import KvPool

_FLOAT_BYTES = 4
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

    kernels: tuple[Kernel, ...]
    """Launched with the layers compiled."""
    eager_launches: int
    """Launched without a compiler."""
    layer_kernels: int
    """Launched by one layer, compiled."""
    all_reduces: tuple[int, ...]
    """Bytes of each all-reduce."""
    copies: int
    """Tensors copied to the device before the step."""
    weight_bytes: int
    """Bytes of the weights that a step reads: all but the table of embeddings."""
    kv_bytes: int
    """Bytes of the keys and values that the step has to read and write."""

    @property
    def bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def flops(self) -> int:
        """Operations of all kernels."""
        return sum(kernel.flops for kernel in self.kernels)


class _CountedAttention(TritonBackend):
    """The Triton backend, which plans as ever, and counts launches instead of making them."""

    def __init__(self, setting: AttentionSetting, counter: KernelCounter) -> None:
        self._store, self._device = setting.store, setting.device
        self._layers = setting.layers
        self._wide_tile = min(wide_tile(shape.heads_per_kv, shape.head_dim) for shape in setting.layers)
        self._counter = counter
        self._rows: Sequence[RowShape] = ()
        self.kv_bytes = 0

    def plan(self, rows: Sequence[RowShape]) -> TritonStep:
        self._rows = rows
        return super().plan(rows)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        metadata: TritonStep,
        scaling: float | None,  # noqa: ARG002 - part of the interface
    ) -> torch.Tensor:
        shape, placement = self._layers[layer], self._store.kv_groups.placements[layer]
        heads, dim, element = queries.shape[1], queries.shape[2], queries.element_size()
        own = 2 * queries.numel() * element
        read = sum(row.end for row in self._rows) * 2 * shape.kv_heads * dim * element
        seen = sum(row.width * row.stored_len + row.width * (row.width + 1) // 2 for row in self._rows)
        self.kv_bytes += read + 2 * len(queries) * shape.kv_heads * dim * element
        for index, plan in enumerate(metadata.queries[placement.window]):
            first = index == 0
            self._counter.add(Kernel("attend_tiles", (own + read) * first, 4 * heads * dim * seen * first))
            if plan.splits > 1:
                parts = plan.splits * len(plan.tokens) * heads * (dim + 2) * _FLOAT_BYTES
                self._counter.add(Kernel("join_splits", 2 * parts))
        return torch.empty_like(queries)

    def write_rotated(
        self,
        layer: int,  # noqa: ARG002 - part of the interface
        fresh: Projections,
        metadata: TritonStep,  # noqa: ARG002
    ) -> torch.Tensor:
        parts = fresh.queries, fresh.keys, fresh.values, fresh.cosines
        self._counter.add(Kernel("rotate_token", 2 * sum(part.numel() * part.element_size() for part in parts)))
        return fresh.queries.new_empty((len(fresh.queries), fresh.queries.shape[1] // fresh.dim, fresh.dim))


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._counter.add(Kernel("normalize_rows", (4 * rows.numel() + weight.numel()) * rows.element_size()))
        return torch.empty_like(rows), torch.empty_like(rows)

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self._counter.add(Kernel("gate_columns", 3 * gates.numel() * gates.element_size()))
        return gates.new_empty(gates.shape)


def count_step(model: RankModel, rows: Sequence[Rows]) -> StepCount:
    """Run a step of one rank on the fake device, decisions included, and count what it does.

    Every step attends by the Triton kernels.
    Raises what PyTorch raises where a tensor is on the wrong device or the host would wait.
    """
    with fake_device() as device:
        loaded, weight_bytes = load(model, device)
        counter = KernelCounter()
        section = PoolSection(block_size=16)
        tokens = sum(kind.count * (kind.stored + kind.fresh + kind.nodes + section.block_size) for kind in rows)
        pool = KvPool(loaded.kv_spec, section, -(-tokens // section.block_size))
        attention = _CountedAttention(attention_setting(loaded, pool), counter)
        runner = ModelRunner(loaded, pool, attention=ChosenBackend("triton", attention, CAPABILITIES))
        if not fuse_layers(loaded.module, _CountedKernels(counter)):
            raise RuntimeError(f"the decoder layers of {model.name} are not fused")
        batch = [row for kind in rows for row in _forward_rows(pool, kind)]
        reduced: list[int] = []
        with _all_reduces(loaded.module, model.ranks, reduced), _regions(loaded.module, counter) as begins, counter:
            logits = runner.forward(batch)
        counter.add(*_decisions(logits, rows))
        reduced += [len(logits) * 2 * 8] * (model.ranks > 1)  # each rank's best scores and tokens
        return StepCount(
            kernels=tuple(counter.fused()),
            eager_launches=len(counter.eager()),
            layer_kernels=_second_layer(counter, begins),
            all_reduces=tuple(reduced),
            copies=counter.copies,
            weight_bytes=weight_bytes,
            kv_bytes=attention.kv_bytes,
        )


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


def _second_layer(counter: KernelCounter, begins: Sequence[int]) -> int:
    """Kernels of the second layer, which is like all that follow."""
    layer = KernelCounter()
    layer.operations = counter.operations[begins[1] : begins[2]]
    return len(layer.fused())


def _forward_rows(pool: KvPool, kind: Rows) -> Iterator[ForwardRow]:
    for _ in range(kind.count):
        table = pool.new_table()
        if kind.stored:
            pool.reserve(table, kind.stored)
            pool.commit(table, (0,) * kind.stored)
        tree = TokenTree.chain(range(kind.nodes))
        select = tuple(range(kind.fresh - 1, kind.fresh + kind.nodes))
        row = ForwardRow(table, (0,) * kind.fresh, tree, select)
        pool.reserve(table, row.end)
        yield row


@contextmanager
def _all_reduces(module: nn.Module, ranks: int, found: list[int]) -> Iterator[None]:
    """Inside, record the bytes of the sums over all ranks, after each attention and each feed-forward network."""

    def record(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        found.append(output.numel() * output.element_size())

    with ExitStack() as stack:
        for name, part in module.named_modules():
            if ranks > 1 and name.endswith(("o_proj", "down_proj")):
                stack.callback(part.register_forward_hook(record).remove)
        yield


def _decisions(logits: torch.Tensor, rows: Sequence[Rows]) -> Iterator[Kernel]:
    """The kernels of `workers.sampling.triton` for sampled rows."""
    count, size = logits.shape
    read = logits.numel() * logits.element_size()
    parts = count * -(-size // 4096) * 2 * _FLOAT_BYTES
    truncated = sum(kind.count * (1 + kind.nodes) for kind in rows if kind.top_p)
    if truncated:
        part = read * truncated // count
        yield Kernel("largest_logits", part)
        for _ in range(_DIGIT_PASSES):
            yield Kernel("sum_digits", part)
            yield Kernel("choose_digits", truncated * 2048 * 2 * 8)
    yield Kernel("best_of_tiles", read + parts)
    yield Kernel("join_tiles", parts)
