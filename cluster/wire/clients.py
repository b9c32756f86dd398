"""The ports over gRPC, and the client of the public service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.core.bounds import MAX_MESSAGE_BYTES
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.errors import (
    DeadlineExceeded,
    DrafterUnavailable,
    InvalidRequest,
    NotReady,
    PilotfishError,
    TargetUnavailable,
)
from cluster.core.ids import SequenceId
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo
from cluster.wire.codec_draft import decode_proposals, encode_draft_rows
from cluster.wire.codec_target import (
    decode_open_result,
    decode_step_result,
    decode_target_info,
    encode_open_rows,
    encode_step_batch,
)
from cluster.wire.connection import open_channel
from cluster.wire.status import from_rpc_error
from pilotfish.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)

Resolve = Callable[[], Awaitable[str]]
"""Where the server is now: asked whenever a connection is opened."""

_GENERATION_SERVICE = "pilotfish.v1.GenerationService"
_QUICK_SECONDS = 10.0
_STEP_SECONDS = 300.0
_RESOLVE_SECONDS = 10.0


class _Connection:
    """One channel, opened when needed and dropped when lost, so that the next call resolves anew."""

    def __init__(
        self,
        resolve: Resolve,
        unavailable: type[PilotfishError],
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._resolve = resolve
        self._unavailable = unavailable
        self._max_message_bytes = max_message_bytes
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None

    async def channel(self) -> grpc.aio.Channel:
        """Raises the port's own `WorkerUnavailable` when nobody knows where the server is."""
        if self._channel is None:
            try:
                async with asyncio.timeout(_RESOLVE_SECONDS):
                    address = await self._resolve()
            except (OSError, TimeoutError) as error:
                raise self._unavailable(f"its address is not known: {error!r}") from error
            if self._channel is None:
                self._channel = open_channel(
                    address, max_message_bytes=self._max_message_bytes, credentials=self._credentials
                )
        return self._channel

    def failed(self, error: grpc.aio.AioRpcError) -> PilotfishError:
        """What to raise for a failed call; forgets the channel if the server was not there.

        It is not closed: other calls may still be under way on it, and it ends with the last of them.
        """
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._channel = None
        return from_rpc_error(error, self._unavailable)

    def readable(self, answer: Any) -> Any:
        """The answer, if it is one: for bytes that are no message of the schema gRPC hands on `None`."""
        if answer is None:
            raise self._unavailable("its answer is no message of the schema")
        return answer

    async def close(self) -> None:
        """Drop the channel; the next call opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class _Exchange:
    """A method whose requests and answers take turns in a stream, called as if it were unary.

    A stream is opened when all others are in use and kept for the next call: what opening costs is paid once. One
    that fails, or is given up, is not used again.
    """

    def __init__(self, connection: _Connection, open_stream: Callable[[grpc.aio.Channel], Any]) -> None:
        self._connection = connection
        self._open = open_stream
        self._idle: list[tuple[grpc.aio.Channel, Any]] = []

    async def __call__(self, request: Any, timeout: float) -> Any:  # noqa: ASYNC109 - the signature is gRPC's
        """The answer. Raises `AioRpcError`, as a unary method does."""
        channel = await self._connection.channel()
        stream = self._take(channel)
        try:
            async with asyncio.timeout(timeout):
                await _write(stream, request)
                answer = await stream.read()
        except TimeoutError:
            stream.cancel()
            raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout} s") from None
        except BaseException:
            stream.cancel()
            raise
        if answer is grpc.aio.EOF:
            raise _failure(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        self._idle.append((channel, stream))
        return answer

    def close(self) -> None:
        """End the streams that are not in use."""
        idle, self._idle = self._idle, []
        for _, stream in idle:
            stream.cancel()

    def _take(self, channel: grpc.aio.Channel) -> Any:
        for opened_on, stream in self._idle:
            if opened_on is not channel:  # the server was lost since
                stream.cancel()
        self._idle = [(opened_on, stream) for opened_on, stream in self._idle if not stream.done()]
        return self._idle.pop()[1] if self._idle else self._open(channel)


async def _write(stream: Any, request: Any) -> None:
    try:
        await stream.write(request)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL:  # so gRPC says that the other side has ended it meanwhile
            raise _failure(grpc.StatusCode.UNAVAILABLE, "the server has ended the stream") from error
        raise


def _failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class GrpcDrafter:
    """`cluster.core.ports.Drafter` over gRPC. Others may use the drafter, too: each client's sequences are its own."""

    def __init__(self, resolve: Resolve, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._client = uuid4().hex
        self._connection = _Connection(resolve, DrafterUnavailable, credentials=credentials)
        self._propose = _Exchange(self._connection, lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Propose())

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        """See the port. Late is `DrafterUnavailable` too."""
        answer = await self._call(self._propose, encode_draft_rows(rows, self._client), timeout_seconds)
        try:
            return decode_proposals(answer)
        except InvalidRequest as error:
            raise DrafterUnavailable(f"the drafter's answer is refused: {error}") from error

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """See the port."""
        stub = draft_pb2_grpc.DraftServiceStub(await self._connection.channel())
        request = draft_pb2.DraftServiceReleaseRequest(sequence_ids=sequence_ids, client=self._client)
        await self._call(stub.Release, request, _QUICK_SECONDS)

    async def close(self) -> None:
        """Close the connection."""
        self._propose.close()
        await self._connection.close()

    async def _call(self, method: Any, request: Any, timeout_seconds: float) -> Any:
        try:
            return self._connection.readable(await method(request, timeout=timeout_seconds))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DrafterUnavailable(f"no answer within {timeout_seconds} s") from error
            # Whatever ails a drafter, the answer to it is the same: go on without.
            raise DrafterUnavailable(str(self._connection.failed(error))) from error


class GrpcTarget:
    """`cluster.core.ports.Target` over gRPC."""

    def __init__(
        self,
        resolve: Resolve,
        credentials: grpc.ChannelCredentials | None = None,
        step_timeout_seconds: float = _STEP_SECONDS,
    ) -> None:
        self._connection = _Connection(resolve, TargetUnavailable, credentials=credentials)
        self._step = _Exchange(self._connection, lambda channel: target_pb2_grpc.TargetServiceStub(channel).Step())
        self._step_timeout_seconds = step_timeout_seconds

    async def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """See the port."""
        stub = await self._stub()
        answer = await self._call(stub.Open, encode_open_rows(rows), self._step_timeout_seconds)
        try:
            return decode_open_result(answer)
        except InvalidRequest as error:
            raise TargetUnavailable(f"the target's answer is refused: {error}") from error

    async def step(self, batch: StepBatch) -> StepResult:
        """See the port."""
        answer = await self._call(self._step, encode_step_batch(batch), self._step_timeout_seconds)
        try:
            return decode_step_result(answer)
        except InvalidRequest as error:
            raise TargetUnavailable(f"the target's answer is refused: {error}") from error

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """See the port."""
        stub = await self._stub()
        request = target_pb2.TargetServiceReleaseRequest(sequence_ids=sequence_ids)
        await self._call(stub.Release, request, self._step_timeout_seconds)

    async def release_all(self) -> None:
        """See the port."""
        stub = await self._stub()
        request = target_pb2.TargetServiceReleaseRequest(all=True)
        await self._call(stub.Release, request, self._step_timeout_seconds)

    async def info(self) -> TargetInfo:
        """See the port."""
        stub = await self._stub()
        answer = await self._call(stub.GetInfo, target_pb2.TargetServiceGetInfoRequest(), _QUICK_SECONDS)
        try:
            return decode_target_info(answer)
        except InvalidRequest as error:
            raise TargetUnavailable(f"the target's answer is refused: {error}") from error

    async def close(self) -> None:
        """Close the connection."""
        self._step.close()
        await self._connection.close()

    async def _stub(self) -> Any:
        return target_pb2_grpc.TargetServiceStub(await self._connection.channel())

    async def _call(self, method: Any, request: Any, timeout_seconds: float) -> Any:
        try:
            return self._connection.readable(await method(request, timeout=timeout_seconds))
        except grpc.aio.AioRpcError as error:
            raised = self._connection.failed(error)
            if isinstance(raised, DeadlineExceeded):
                raised = TargetUnavailable(f"no answer within {timeout_seconds} s")
            raise raised from error


class GenerationClient:
    """The public service, seen from outside. Errors arrive as the `PilotfishError` that was raised there."""

    def __init__(self, resolve: Resolve, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._connection = _Connection(resolve, NotReady, credentials=credentials)

    async def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """One answer, at most `timeout_seconds` long; closing it cancels the call."""
        stub = await self._stub()
        call = stub.Generate(request, timeout=timeout_seconds)
        try:
            async for response in call:
                yield self._connection.readable(response)
        except grpc.aio.AioRpcError as error:
            raise self._connection.failed(error) from error
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        """Stop a running request; false when there was none."""
        stub = await self._stub()
        answer = await self._call(stub.Abort, generation_pb2.AbortRequest(request_id=request_id))
        return bool(answer.aborted)

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        """Text or chat to tokens."""
        stub = await self._stub()
        answer: generation_pb2.TokenizeResponse = await self._call(stub.Tokenize, request)
        return answer

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        """Tokens to text."""
        stub = await self._stub()
        answer: generation_pb2.DetokenizeResponse = await self._call(stub.Detokenize, request)
        return answer

    async def list_models(self) -> Sequence[generation_pb2.Model]:
        """The models served."""
        stub = await self._stub()
        answer = await self._call(stub.ListModels, generation_pb2.ListModelsRequest())
        return tuple(answer.models)

    async def get_model(self, name: str) -> generation_pb2.Model:
        """One of them. Raises `UnknownModel`."""
        stub = await self._stub()
        answer = await self._call(stub.GetModel, generation_pb2.GetModelRequest(model=name))
        model: generation_pb2.Model = answer.model
        return model

    async def metrics(self) -> tuple[bytes, str]:
        """Prometheus text and its content type."""
        stub = operations_pb2_grpc.OperationsServiceStub(await self._connection.channel())
        answer = await self._call(stub.GetMetrics, operations_pb2.GetMetricsRequest())
        return bytes(answer.exposition), str(answer.content_type)

    async def is_ready(self) -> bool:
        """Whether requests are taken."""
        try:
            stub: Any = health_pb2_grpc.HealthStub(await self._connection.channel())
            answer = await self._call(stub.Check, health_pb2.HealthCheckRequest(service=_GENERATION_SERVICE))
        except PilotfishError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def _stub(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(await self._connection.channel())

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return self._connection.readable(await method(request, timeout=_QUICK_SECONDS))
        except grpc.aio.AioRpcError as error:
            raise self._connection.failed(error) from error
