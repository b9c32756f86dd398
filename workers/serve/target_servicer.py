"""`TargetService` over one engine, or over the first of many ranks."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc

from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.verification import (
    OpenResult,
    OpenRow,
    RowFault,
    StepBatch,
    StepResult,
    TargetInfo,
    Verdict,
    VerifyRow,
)
from cluster.wire.codec_common import decode_sequence_ids
from cluster.wire.codec_target import (
    decode_open_rows,
    decode_step_batch,
    encode_occupancy,
    encode_open_result,
    encode_step_result,
    encode_target_info,
)
from pilotfish.v1 import target_pb2, target_pb2_grpc
from workers.serve.compute_thread import ComputeThread, compute_rows, counted


class StepEngine(Protocol):
    """What computes: `TargetEngine` alone, or `DriverRank` with its worker ranks. Synchronous."""

    def step(self, batch: StepBatch) -> StepResult:
        """Compute the rows; leaves its state consistent when it raises. Raises `TargetUnavailable`."""
        ...

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        """Free the sequences' blocks; unknown ones are no error."""
        ...

    def release_all(self) -> KvOccupancy:
        """Free every sequence's blocks."""
        ...

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Create sequences with whatever of their KV is stored already."""
        ...

    def info(self) -> TargetInfo:
        """What this target is."""
        ...

    def close(self) -> None:
        """Free memory and files outside of Python objects, and stop the worker ranks. Closing twice is harmless."""
        ...


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Owns the engine and the thread it computes in.

    Errors are raised as they are; the server maps them. A step that nobody waits for any more is not
    begun; one that was begun is finished, and repeating its rows repeats their verdicts.
    """

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._compute = ComputeThread("target")

    async def Step(
        self,
        request_iterator: AsyncIterator[target_pb2.TargetServiceStepRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[target_pb2.TargetServiceStepResponse]:
        """Verify."""
        async for request in request_iterator:
            batch = decode_step_batch(request)
            yield encode_step_result(await self._compute.run(self._step, batch))

    async def Release(
        self, request: target_pb2.TargetServiceReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.TargetServiceReleaseResponse:
        """Free sequences."""
        if request.all:
            kv = await self._compute.run_surely(self._engine.release_all)
        else:
            kv = await self._compute.run_surely(self._engine.release, decode_sequence_ids(request.sequence_ids))
        return target_pb2.TargetServiceReleaseResponse(kv=encode_occupancy(kv))

    async def Open(
        self, request: target_pb2.TargetServiceOpenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.TargetServiceOpenResponse:
        """Create sequences with whatever of their KV is stored already."""
        rows = decode_open_rows(request)
        return encode_open_result(await self._compute.run(self._engine.open, rows))

    async def GetInfo(
        self, request: target_pb2.TargetServiceGetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.TargetServiceGetInfoResponse:
        """What this target is."""
        return encode_target_info(await self._compute.run(self._engine.info))

    @property
    def failures(self) -> int:
        """Steps in a row that failed for no row's fault."""
        return self._compute.failures

    async def close(self) -> None:
        """Finish what is under way and close the engine. Closing again does nothing."""
        await self._compute.close(self._engine.close)

    def _step(self, batch: StepBatch) -> StepResult:
        results: list[StepResult] = []

        def compute(rows: Sequence[VerifyRow]) -> tuple[Verdict, ...]:
            results.append(self._engine.step(StepBatch(tuple(rows))))
            return results[-1].verdicts

        verdicts = counted(self._compute, lambda: compute_rows(batch.rows, compute, _faulted))
        return StepResult(verdicts, results[-1].kv, sum(result.step_seconds for result in results))


def _faulted(row: VerifyRow, fault: RowFault) -> Verdict:
    return Verdict(row.sequence_id, row.base_len, fault=fault)
