"""The client of the public generation service."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.core.errors import NotReady, PilotfishError
from cluster.wire.connection import SHORT_CALL_SECONDS, Connection, Resolve
from cluster.wire.peer_access import OPEN, PeerAccess, PublicAccess
from pilotfish.v1 import generation_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc

_GENERATION_SERVICE = "pilotfish.v1.GenerationService"


class GenerationClient:
    """A client of the public service. It raises the same `PilotfishError` as the service. `async with` closes it."""

    def __init__(self, resolve: Resolve, access: PeerAccess | PublicAccess = OPEN) -> None:
        self._connection = Connection(resolve, NotReady, access=access)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the responses of one request. Closing the iterator cancels the call."""
        channel = await self._connection.channel()
        call = _stub(channel).Generate(request, timeout=timeout_seconds, metadata=self._connection.metadata)
        try:
            async for response in call:
                yield self._connection.checked(response)
        except grpc.aio.AioRpcError as error:
            raise self._connection.failed(error, channel) from error
        finally:
            call.cancel()

    async def abort(self, request_id: str, client: str = "") -> bool:
        """Abort a request of the client with that name. Returns whether it was running."""
        answer = await self._call(
            lambda channel: _stub(channel).Abort, generation_pb2.AbortRequest(request_id=request_id, client=client)
        )
        return bool(answer.aborted)

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        """Convert text or a conversation to token ids."""
        answer: generation_pb2.TokenizeResponse = await self._call(lambda channel: _stub(channel).Tokenize, request)
        return answer

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        """Convert token ids to text."""
        answer: generation_pb2.DetokenizeResponse = await self._call(lambda channel: _stub(channel).Detokenize, request)
        return answer

    async def list_models(self) -> Sequence[generation_pb2.Model]:
        """Return the served models."""
        answer = await self._call(lambda channel: _stub(channel).ListModels, generation_pb2.ListModelsRequest())
        return tuple(answer.models)

    async def get_model(self, name: str) -> generation_pb2.Model:
        """Return one served model. Raises `UnknownModel`."""
        answer = await self._call(lambda channel: _stub(channel).GetModel, generation_pb2.GetModelRequest(model=name))
        model: generation_pb2.Model = answer.model
        return model

    async def metrics(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus text format and its content type."""
        answer = await self._call(
            lambda channel: operations_pb2_grpc.OperationsServiceStub(channel).GetMetrics,
            operations_pb2.GetMetricsRequest(),
        )
        return bytes(answer.exposition), str(answer.content_type)

    async def is_ready(self) -> bool:
        """Whether the service accepts requests."""
        return await self._is_serving(_GENERATION_SERVICE)

    async def is_reachable(self) -> bool:
        """Whether the server answers, ready or not."""
        return await self._is_serving("")

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def _is_serving(self, service: str) -> bool:
        try:
            answer = await self._call(_health_check, health_pb2.HealthCheckRequest(service=service))
        except PilotfishError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _call(self, method: Callable[[grpc.aio.Channel], Any], request: Any) -> Any:
        return await self._connection.call(method, request, SHORT_CALL_SECONDS)


def _stub(channel: grpc.aio.Channel) -> Any:
    return generation_pb2_grpc.GenerationServiceStub(channel)


def _health_check(channel: grpc.aio.Channel) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Check
