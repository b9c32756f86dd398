"""A tensor-parallel group in processes of its own, as an engine of this process. The processes form many groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from cluster.core.config.sections import Configuration
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, StepSample, TargetInfo
from cluster.wire.codec.step import decode_step_result, encode_step_result
from pilotfish.v1.target_pb2 import TargetServiceStepResponse
from tests.support.engines.rank_processes import end_ranks, free_port, start_ranks

PROFILE = (StepSample(1, 1, 0.01), StepSample(1, 8, 0.02))
"""Times of steps that no group measures again."""
LONGEST_SECONDS = 60.0
"""Longest wait for rank 0."""


class RankGroup:
    """The driver rank of the group that was formed last. It is a `StepEngine`."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        self._is_formed = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self._pipes)

    def form(self, configuration: Configuration) -> RankGroup:
        """Build the engine of each rank, in place of those before. Raises what rank 0 raises, or `TimeoutError`."""
        self.close()
        for pipe in self._pipes:
            pipe.send(configuration.model_dump(mode="json"))
        self._answer()
        self._is_formed = True
        return self

    def step(self, batch: StepBatch) -> StepResult:
        return decode_step_result(TargetServiceStepResponse.FromString(self._ask("step", batch)))

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        result: OpenResult = self._ask("open", rows)
        return result

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        result: KvOccupancy = self._ask("release", sequence_ids)
        return result

    def release_all(self) -> KvOccupancy:
        result: KvOccupancy = self._ask("release_all")
        return result

    def info(self) -> TargetInfo:
        result: TargetInfo = self._ask("info")
        return result

    def close(self) -> None:
        """Close the engines of all ranks. Their processes wait for the next group."""
        if self._is_formed:
            self._is_formed = False
            self._ask("close")

    def _ask(self, called: str, *arguments: object) -> Any:
        self._pipes[0].send((called, arguments))
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipes[0].poll(LONGEST_SECONDS):
            raise TimeoutError(f"rank 0 has not answered for {LONGEST_SECONDS:g} s")
        answer = self._pipes[0].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def rank_group(ranks: int) -> Iterator[RankGroup]:
    """Processes for a number of ranks, which end with the context."""
    port = free_port()
    pairs = [Pipe() for _ in range(ranks)]
    processes = start_ranks(_serve, [(ranks, port, theirs) for _, theirs in pairs])
    for _, theirs in pairs:
        theirs.close()
    try:
        yield RankGroup([ours for ours, _ in pairs])
    finally:
        for ours, _ in pairs:
            ours.close()
        end_ranks(processes)


def _serve(rank: int, ranks: int, port: int, pipe: Connection) -> None:
    """Run one rank in its process, until the other end of the pipe is closed."""
    import torch

    from cluster.core.config.target_section import TargetSection
    from tests.unit.draft.contract.methods import example_method
    from workers.verify.group import join_group

    torch.set_num_threads(1)
    join_group(TargetSection(device="cpu", tensor_parallel=ranks), rank, "127.0.0.1", port)
    with contextlib.suppress(EOFError, OSError), example_method():
        while True:
            _serve_group(rank, pipe)
    os._exit(0)


def _serve_group(rank: int, pipe: Connection) -> None:
    """Form the next group and run this rank of it until it is closed."""
    from workers.draft.registry import create, create_for_worker_rank
    from workers.serve.configuration import load_configuration
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
        group = DriverRank(build_engine(target, rank, method, PROFILE), target.step_timeout_seconds)
    except Exception as error:
        pipe.send(error)
        raise
    pipe.send(None)
    called = ""
    while called != "close":
        called, arguments = pipe.recv()
        try:
            answer = getattr(group, called)(*arguments)
            pipe.send(encode_step_result(answer).SerializeToString() if called == "step" else answer)
        except Exception as error:
            pipe.send(error)
