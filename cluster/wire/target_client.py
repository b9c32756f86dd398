"""The `Target` port over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from cluster.core.config.cluster_section import LEASE_SECONDS
from cluster.core.errors import InvalidRequest, TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo
from cluster.wire.codec.opening import decode_open_result, encode_open_rows
from cluster.wire.codec.step import decode_step_result, encode_step_batch
from cluster.wire.codec.target_info import decode_target_info
from cluster.wire.connection import SHORT_CALL_SECONDS, Connection, Resolve
from cluster.wire.lease import Lease
from cluster.wire.peer_access import OPEN, PeerAccess
from cluster.wire.stream_exchange import StreamExchange
from pilotfish.v1 import target_pb2, target_pb2_grpc

_STEP_SECONDS = 300.0

Decoded = TypeVar("Decoded")


class GrpcTarget:
    """`cluster.core.ports.Target` over gRPC."""

    def __init__(
        self,
        resolve: Resolve,
        access: PeerAccess = OPEN,
        step_timeout_seconds: float = _STEP_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._connection = Connection(resolve, TargetUnavailable, access=access)
        self._lease = Lease(self._connection, lease_seconds)
        self._step = StreamExchange(self._connection, lambda channel: _stub(channel).Step)
        self._step_timeout_seconds = step_timeout_seconds

    async def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        answer = await self._lease.call(
            lambda channel: _stub(channel).Open, encode_open_rows(rows, self._lease.client), self._step_timeout_seconds
        )
        return _decoded(decode_open_result, answer)

    async def step(self, batch: StepBatch) -> StepResult:
        answer = await self._lease.call(
            self._step.on, encode_step_batch(batch, self._lease.client), self._step_timeout_seconds
        )
        return _decoded(decode_step_result, answer)

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        request = target_pb2.TargetServiceReleaseRequest(sequence_ids=sequence_ids, client=self._lease.client)
        await self._lease.call(lambda channel: _stub(channel).Release, request, self._step_timeout_seconds)

    async def release_all(self) -> None:
        request = target_pb2.TargetServiceReleaseRequest(all=True, client=self._lease.client)
        await self._lease.call(lambda channel: _stub(channel).Release, request, self._step_timeout_seconds)

    async def info(self) -> TargetInfo:
        answer = await self._lease.call(
            lambda channel: _stub(channel).GetInfo, target_pb2.TargetServiceGetInfoRequest(), SHORT_CALL_SECONDS
        )
        return _decoded(decode_target_info, answer)

    async def close(self) -> None:
        """Close the connection."""
        self._lease.close()
        self._step.close()
        await self._connection.close()


def _stub(channel: grpc.aio.Channel) -> Any:
    return target_pb2_grpc.TargetServiceStub(channel)


def _decoded(decode: Callable[[Any], Decoded], answer: Any) -> Decoded:
    try:
        return decode(answer)
    except InvalidRequest as error:
        raise TargetUnavailable(f"the target's answer is invalid: {error}") from error
