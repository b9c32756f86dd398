"""The ports of the coordinator and of the ingress over the simulated network, through the real codecs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import grpc

from cluster.core.drafting import DraftRow, Proposal
from cluster.core.errors import DeadlineExceeded, DrafterUnavailable, InvalidRequest, NotReady, TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo
from cluster.wire.codec.draft import decode_proposals, encode_draft_rows
from cluster.wire.codec.opening import decode_open_result, encode_open_rows
from cluster.wire.codec.step import decode_step_result, encode_step_batch
from cluster.wire.codec.target_info import decode_target_info
from cluster.wire.connection import SHORT_CALL_SECONDS
from cluster.wire.status import from_rpc_error
from deploy.simulation.invariants import Ledger
from deploy.simulation.network import Network
from pilotfish.v1 import draft_pb2, generation_pb2, target_pb2


class RemoteTarget:
    """`Target` over the simulated network, with the timeouts and errors of `GrpcTarget`."""

    def __init__(self, network: Network, address: str, step_timeout_seconds: float, ledger: Ledger) -> None:
        self._network = network
        self._address = address
        self._step_timeout = step_timeout_seconds
        self._ledger = ledger

    async def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        request = encode_open_rows(rows).SerializeToString()
        answer = await self._call("Open", request, self._step_timeout)
        try:
            return decode_open_result(target_pb2.TargetServiceOpenResponse.FromString(answer))
        except InvalidRequest as error:
            raise TargetUnavailable(f"the target's answer is invalid: {error}") from error

    async def step(self, batch: StepBatch) -> StepResult:
        self._ledger.check_rows(batch.rows)
        answer = await self._call("Step", encode_step_batch(batch).SerializeToString(), self._step_timeout)
        try:
            result = decode_step_result(target_pb2.TargetServiceStepResponse.FromString(answer))
        except InvalidRequest as error:
            raise TargetUnavailable(f"the target's answer is invalid: {error}") from error
        for verdict in result.verdicts:
            if verdict.proposal is not None:
                self._ledger.note_proposal(verdict.proposal)
        return result

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        request = target_pb2.TargetServiceReleaseRequest(sequence_ids=sequence_ids)
        await self._call("Release", request.SerializeToString(), self._step_timeout)

    async def release_all(self) -> None:
        request = target_pb2.TargetServiceReleaseRequest(all=True)
        await self._call("Release", request.SerializeToString(), self._step_timeout)

    async def info(self) -> TargetInfo:
        answer = await self._call("GetInfo", b"", SHORT_CALL_SECONDS)
        return decode_target_info(target_pb2.TargetServiceGetInfoResponse.FromString(answer))

    async def _call(self, method: str, request: bytes, timeout_seconds: float) -> bytes:
        try:
            return await self._network.call(self._address, method, request, timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raised = from_rpc_error(error, TargetUnavailable)
            if isinstance(raised, DeadlineExceeded):
                raised = TargetUnavailable(f"no answer within {timeout_seconds} s")
            raise raised from error


class RemoteDrafter:
    """`Drafter` over the simulated network, with the timeouts and errors of `GrpcDrafter`."""

    def __init__(self, network: Network, address: str, client: str, ledger: Ledger) -> None:
        """`client` names the owner of the sequence ids."""
        self._network = network
        self._address = address
        self._client = client
        self._ledger = ledger

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        request = encode_draft_rows(rows, self._client).SerializeToString()
        answer = await self._call("Propose", request, timeout_seconds)
        try:
            proposals = decode_proposals(draft_pb2.DraftServiceProposeResponse.FromString(answer))
        except InvalidRequest as error:
            raise DrafterUnavailable(f"the drafter's answer is invalid: {error}") from error
        for proposal in proposals:
            self._ledger.note_proposal(proposal)
        return proposals

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        request = draft_pb2.DraftServiceReleaseRequest(sequence_ids=sequence_ids, client=self._client)
        await self._call("Release", request.SerializeToString(), SHORT_CALL_SECONDS)

    async def _call(self, method: str, request: bytes, timeout_seconds: float) -> bytes:
        try:
            return await self._network.call(self._address, method, request, timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise DrafterUnavailable(str(from_rpc_error(error, DrafterUnavailable))) from error


class RemoteGeneration:
    """The public generation service over the simulated network, with the errors of `GenerationClient`."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self.address = address

    async def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the responses of one request. Closing the iterator cancels the call."""
        stream = self._network.stream(self.address, "Generate", request.SerializeToString(), timeout_seconds)
        try:
            async with aclosing(stream) as responses:
                async for response in responses:
                    yield generation_pb2.GenerateResponse.FromString(response)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, NotReady) from error

    async def abort(self, request_id: str, client: str = "") -> bool:
        """Abort a request. Returns whether it was running."""
        request = generation_pb2.AbortRequest(request_id=request_id, client=client).SerializeToString()
        try:
            return bool(await self._network.call(self.address, "Abort", request, SHORT_CALL_SECONDS))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, NotReady) from error

    async def close(self) -> None:
        """Do nothing: the simulated network keeps no connection."""
