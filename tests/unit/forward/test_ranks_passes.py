"""A tensor-parallel group has the hidden states and the partial passes of one rank alone, however its layers run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.nn import functional

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.tree import TokenTree
from tests.support.engines.rank_processes import start_ranks
from tests.support.fakes.layer_kernels import ReferenceKernels
from tests.support.models import tiny
from workers.forward import fused_layers
from workers.forward.fused_trial import fuse_if_equal
from workers.forward.loaded_model import PassOptions
from workers.forward.partial_pass import PartialPass
from workers.forward.projections import Gated
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve.node import free_port

pytestmark = pytest.mark.slow

RANKS = 2
TAPS = (0, 1, 2)
PARTS = {
    "of the first layer": PartialPass(layers=1, exit_norm=1.0 + torch.arange(48.0) / 48),
    "without two parts": PartialPass(skip_attention=frozenset({1}), skip_mlp=frozenset({0})),
}
TEXT = tuple((7 * index) % 90 + 3 for index in range(20))
BRANCHING = TokenTree((7, 8, 9, 7), (-1, -1, 0, 2))
SECONDS = 300.0


class FailsLater(ReferenceKernels):
    """Kernels of which one fails on rank 1, between two sums over ranks of the second layer."""

    def __init__(self) -> None:
        self._calls = 0

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if self._calls == 3 and distributed.get_rank() == 1:
            raise RuntimeError("it fails on one rank")
        return super().silu_mul(gates, values)


class WithProducts(ReferenceKernels):
    """Kernels with products of their own, whose sum over ranks comes before the addition to the residual stream."""

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, follows_gate: bool) -> LinearOfRank:
        return LinearOfRank(weight, bias, most_gated=100 if follows_gate else 0)


class LinearOfRank:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, most_gated: int) -> None:
        self._linear = weight, bias
        self.most_gated = most_gated

    def multiply(self, x: torch.Tensor | Gated) -> torch.Tensor:
        if isinstance(x, Gated):
            x = functional.silu(x.gates) * x.values
        return functional.linear(x, *self._linear)

    def add_and_normalize(
        self, x: torch.Tensor | Gated, stream: torch.Tensor, norm: tuple[torch.Tensor, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class InHalves(ReferenceKernels):
    """Kernels that know whether the ranks summed one half of the rows while they multiplied the other."""

    summed: ClassVar[list[str]] = []

    def begin_sum(self, part: torch.Tensor) -> Callable[[], None]:
        self.summed.append("begin")
        wait = super().begin_sum(part)

        def end() -> None:
            self.summed.append("end")
            wait()

        return end


FORMS: dict[str, tuple[type[ReferenceKernels] | None, tuple[str | None, ...]]] = {
    "as they are": (None, ()),
    "fused": (ReferenceKernels, (None, None)),
    "with products": (WithProducts, (None, None)),
    "in halves": (InHalves, (None, None)),
    "refused": (FailsLater, ("another rank cannot compute it", "RuntimeError('it fails on one rank')")),
}
"""How the layers run: the kernels that fuse them, and why each rank then does not fuse them."""


def passes(directory: Path, rank: int = 0, ranks: int = 1, form: str = "as they are") -> dict[str, torch.Tensor]:
    """What one rank computes for two rows, one with a tree."""
    section = ModelSection(path=str(directory), device="cpu", compile="off", native="off")
    model = load_model(section, rank=rank, tensor_parallel=ranks)
    kernels, problems = FORMS[form]
    if form == "in halves":
        fused_layers.LEAST_IN_HALVES, fused_layers._HALF_TILE = 4, 2
    if kernels is not None:
        assert fuse_if_equal(model, kernels) == problems[rank]
    pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=100)
    runner = ModelRunner(model, pool, TAPS)
    rows = [
        ForwardRow(pool.new_table(), TEXT, BRANCHING, (len(TEXT) - 1,)),
        ForwardRow(pool.new_table(), TEXT[:5], select=(4,)),
    ]
    for row in rows:
        pool.reserve(row.table, row.end)
    InHalves.summed.clear()
    runner.forward(rows)
    if form == "in halves":
        assert InHalves.summed == ["begin", "begin", "end", "begin", "end", "begin", "end", "end"] * len(model.layers)
    found = {"tree": runner.hidden_of(0, (0, 2, 3)).clone(), "prompt": runner.hidden_of(1).clone()}
    return found | {
        f"logits {name}": runner.forward(rows, PassOptions(partial)).clone() for name, partial in PARTS.items()
    }


def run_rank(rank: int, directory: Path, port: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    for form in FORMS:
        save_file(passes(directory, rank, RANKS, form), directory / f"rank-{rank}-{form}.safetensors")
    distributed.barrier()
    os._exit(0)


def check(found: Sequence[dict[str, torch.Tensor]], alone: dict[str, torch.Tensor]) -> None:
    """The ranks have computed what one rank alone has."""
    for name in ("tree", "prompt"):
        for own in found:
            torch.testing.assert_close(own[name], alone[name], rtol=2**-7, atol=2e-3)
    for name in alone.keys() - {"tree", "prompt"}:  # each rank has its own part of the vocabulary
        torch.testing.assert_close(torch.cat([own[name] for own in found], dim=1), alone[name], rtol=1e-4, atol=1e-4)


def test_ranks_have_the_hidden_states_and_the_partial_passes_of_one_rank_alone(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama(num_attention_heads=4, num_key_value_heads=2), sharpness=1.5)
    ranks = start_ranks(run_rank, [(directory, free_port("127.0.0.1"))] * RANKS)
    alone = passes(directory)
    for process in ranks:
        process.join(SECONDS)
        assert process.exitcode == 0
    for form in FORMS:
        found = [load_file(directory / f"rank-{rank}-{form}.safetensors") for rank in range(RANKS)]
        check(found, alone)
        assert all(torch.equal(found[0][name], found[1][name]) for name in ("tree", "prompt")), form
