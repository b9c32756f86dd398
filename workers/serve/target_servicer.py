"""`TargetService` over an engine, or over the driver rank of a tensor-parallel group."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import grpc

from cluster.core.drafting import RowFault
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.tree import EMPTY_TREE
from cluster.core.verification import (
    LearningStatus,
    OpenResult,
    OpenRow,
    StepBatch,
    StepResult,
    TargetInfo,
    Verdict,
    VerifyRow,
)
from cluster.wire.codec.common import decode_client, decode_sequence_ids
from cluster.wire.codec.opening import decode_open_rows, encode_open_result
from cluster.wire.codec.step import decode_step_batch, encode_step_result
from cluster.wire.codec.target_info import encode_occupancy, encode_target_info
from pilotfish.v1 import target_pb2, target_pb2_grpc
from workers.serve.compute_thread import ComputeThread, compute_rows, count_failures
from workers.serve.lease_servicer import LeasedServicer, Leases


class StepEngine(Protocol):
    """Computes steps: `TargetEngine` alone, or `DriverRank` with its worker ranks. Synchronous."""

    def step(self, batch: StepBatch) -> StepResult:
        """Verify the rows. The state stays consistent when this raises. Raises `TargetUnavailable`."""

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        """Free the sequences' blocks; unknown ids are no error."""

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Create sequences, each with as much of its KV as is already stored."""

    def info(self) -> TargetInfo:
        """Describe this target."""

    def close(self) -> None:
        """Free memory and files outside of Python objects, and stop the worker ranks. Closing twice is harmless."""


@runtime_checkable
class GoesAhead(Protocol):
    """A `StepEngine` that can launch steps before their rows come."""

    @property
    def goes_ahead(self) -> bool:
        """Whether `step_ahead` may launch a step."""

    def step_ahead(self) -> bool:
        """Launch the next step if its rows are as good as known. Returns whether more is left to do."""


class TargetServicer(LeasedServicer[KvOccupancy], target_pb2_grpc.TargetServiceServicer):
    """Owns the engine and the thread that it computes in. `WireServer` maps raised errors to gRPC status codes.

    A cancelled step that has not begun is not computed. One that has begun is finished, and repeating its rows repeats
    their verdicts. Sequences belong to the lease of the client that stored them. While no call waits, an engine may
    launch the next step.
    """

    def __init__(
        self,
        engine: StepEngine,
        leases: Leases | None = None,
        learning: Callable[[], LearningStatus] | None = None,
    ) -> None:
        """`learning` says what the draft on the target has learned."""
        self._engine = engine
        self._learning = learning
        ahead = engine.step_ahead if isinstance(engine, GoesAhead) and engine.goes_ahead else None
        super().__init__(ComputeThread("target", ahead), engine.release, leases)

    async def Step(
        self,
        request_iterator: AsyncIterator[target_pb2.TargetServiceStepRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[target_pb2.TargetServiceStepResponse]:
        """Verify batches of rows, one response per request."""
        async for request in request_iterator:
            client = decode_client(request.client)
            batch = decode_step_batch(request, client)
            with self.leases.call(client):
                result = await self._compute.run(self._step, client, batch)
            yield encode_step_result(result, client)

    async def Release(
        self, request: target_pb2.TargetServiceReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.TargetServiceReleaseResponse:
        """Free the named sequences of the client, or all of them."""
        client = decode_client(request.client)
        sequence_ids = decode_sequence_ids(request.sequence_ids, prefix=client)
        if request.all:
            sequence_ids = self.leases.stored(client)
        with self.leases.call(client):
            kv = await self._compute.run_shielded(self._release_of, client, sequence_ids)
        return target_pb2.TargetServiceReleaseResponse(kv=encode_occupancy(kv))

    async def Open(
        self, request: target_pb2.TargetServiceOpenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.TargetServiceOpenResponse:
        """Create sequences, each with as much of its KV as is already stored."""
        client = decode_client(request.client)
        rows = decode_open_rows(request, client)
        with self.leases.call(client):
            return encode_open_result(await self._compute.run(self._open, client, rows))

    async def GetInfo(
        self, request: target_pb2.TargetServiceGetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.TargetServiceGetInfoResponse:
        """Describe this target."""
        return encode_target_info(await self._compute.run(self._engine.info))

    async def close(self) -> None:
        """Finish the steps that have begun and close the engine. Closing again does nothing."""
        await self._compute.close(self._engine.close)

    def _open(self, client: str, rows: Sequence[OpenRow]) -> OpenResult:
        self.leases.store(client, (row.sequence_id for row in rows))
        return self._engine.open(rows)

    def _step(self, client: str, batch: StepBatch) -> StepResult:
        self.leases.store(client, (row.sequence_id for row in batch.rows))
        results: list[StepResult] = []

        def compute(rows: Sequence[VerifyRow]) -> tuple[Verdict, ...]:
            results.append(self._engine.step(StepBatch(tuple(rows))))
            return results[-1].verdicts

        verdicts = count_failures(self._compute, lambda: compute_rows(batch.rows, compute, _faulted, _without_tree))
        learning = None if self._learning is None else self._learning()
        return replace(StepResult.of_parts(results, verdicts), learning=learning)


def _without_tree(row: VerifyRow) -> VerifyRow | None:
    """The row without its draft tree; `None` if it has none."""
    return replace(row, tree=EMPTY_TREE, distributions=()) if row.tree else None


def _faulted(row: VerifyRow, fault: RowFault) -> Verdict:
    return Verdict(row.sequence_id, row.base_len, fault=fault)
