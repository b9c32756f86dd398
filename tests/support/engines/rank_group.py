"""A tensor-parallel group in processes of its own, as an engine of this process. The processes form many groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cluster.core.config.sections import Configuration
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.request import SamplingParameters
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, StepSample, TargetInfo
from cluster.wire.codec.step import decode_step_result, encode_step_result
from pilotfish.v1.target_pb2 import TargetServiceStepResponse
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import Ranks, running_ranks
from workers.serve.configuration import load_configuration

PROFILE = (StepSample(1, 1, 0.01), StepSample(1, 8, 0.02))
"""Times of steps that no group measures again."""

REQUESTS = {
    "greedy": ((5, 17, 33, 8, 60, 41, 41, 9), SamplingParameters(temperature=0.0)),
    "sampled": ((7, 7, 20), SamplingParameters(temperature=0.9, seed=4)),
}
"""Prompts and parameters for comparisons with one rank."""


class RankGroup:
    """The driver rank of the group that was formed last. It is a `StepEngine`."""

    def __init__(self, processes: Ranks) -> None:
        self._processes = processes
        self._is_formed = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self._processes.pipes)

    def form(self, configuration: Configuration) -> RankGroup:
        """Build the engine of each rank, in place of those before. Raises what rank 0 raises, or `TimeoutError`."""
        self.close()
        for pipe in self._processes.pipes:
            pipe.send(configuration.model_dump(mode="json"))
        self._processes.answer(0)
        self._is_formed = True
        return self

    def step(self, batch: StepBatch) -> StepResult:
        return decode_step_result(TargetServiceStepResponse.FromString(self._processes.ask("step", batch)))

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        result: OpenResult = self._processes.ask("open", rows)
        return result

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        result: KvOccupancy = self._processes.ask("release", sequence_ids)
        return result

    def release_all(self) -> KvOccupancy:
        result: KvOccupancy = self._processes.ask("release_all")
        return result

    def info(self) -> TargetInfo:
        result: TargetInfo = self._processes.ask("info")
        return result

    def captured(self) -> int:
        """CUDA graphs of the first rank."""
        count: int = self._processes.ask("captured")
        return count

    def close(self) -> None:
        """Close the engines of all ranks. Their processes wait for the next group."""
        if self._is_formed:
            self._is_formed = False
            self._processes.ask("close")


def configure_ranks(
    directory: Path, ranks: int, *, layers: int | None = None, pool_bytes: int = 1 << 20, **target: object
) -> Configuration:
    """A target on CPUs, unless `device` is given. With `layers`, these draft by early exit: if they are all, what is
    drafted is decided."""
    chosen: dict[str, Any] = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(KEPT)}
    chosen |= {"tensor_parallel": ranks, "kv": {"block_size": 4, "pool_bytes": pool_bytes}, **target}
    draft = {"methods": ["early_exit"], "placement": "target", "early_exit": {"layers": layers}}
    return load_configuration({"target": chosen} | ({} if layers is None else {"draft": draft}))


@contextmanager
def rank_group(ranks: int, device: str = "cpu") -> Iterator[RankGroup]:
    """Processes for a number of ranks, which end with the context."""
    with running_ranks(ranks, _serve, ranks, device) as processes:
        yield RankGroup(processes)


def _serve(rank: int, ranks: int, device: str, port: int, pipe: Connection) -> None:
    """Run one rank in its process, until the other end of the pipe is closed."""
    import torch

    from cluster.core.config.target_section import TargetSection
    from tests.unit.draft.contract.methods import example_method
    from workers.verify.group import join_group

    torch.set_num_threads(1)
    join_group(TargetSection.model_validate({"device": device, "tensor_parallel": ranks}), rank, "127.0.0.1", port)
    with contextlib.suppress(EOFError, OSError), example_method():
        while True:
            _serve_group(rank, pipe)
    os._exit(0)


def _serve_group(rank: int, pipe: Connection) -> None:
    """Form the next group and run this rank of it until it is closed."""
    from workers.draft.registry import create, create_for_worker_rank
    from workers.verify.build import build_engine
    from workers.verify.group import DriverRank, run_worker_rank

    values: Mapping[str, Any] = pipe.recv()
    configuration = load_configuration(values)
    draft, target = configuration.draft, configuration.target
    if rank > 0:
        engine = build_engine(target, rank, create_for_worker_rank(draft, target), PROFILE)
        run_worker_rank(engine, target.step_timeout_seconds)
        return
    try:
        method = create(draft, target) if draft.is_colocated else None
        engine = build_engine(target, rank, method, PROFILE)
        group = DriverRank(engine, target.step_timeout_seconds)
    except Exception as error:
        pipe.send(error)
        raise
    pipe.send(None)
    called = ""
    while called != "close":
        called, arguments = pipe.recv()
        try:
            graphs = engine._runner.graphs
            captured = 0 if graphs is None else len(graphs.passes.captured)
            answer: Any = captured if called == "captured" else getattr(group, called)(*arguments)
            pipe.send(encode_step_result(answer).SerializeToString() if called == "step" else answer)
        except Exception as error:
            pipe.send(error)
