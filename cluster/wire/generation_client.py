"""The client of the public generation service."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.core.errors import NotReady, PilotfishError
from cluster.wire.connection import SHORT_CALL_SECONDS, Connection, Resolve
from pilotfish.v1 import generation_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc

_GENERATION_SERVICE = "pilotfish.v1.GenerationService"


class GenerationClient:
    """The public service, seen from outside. Errors arrive as the `PilotfishError` that was raised there."""

    def __init__(self, resolve: Resolve, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._connection = Connection(resolve, NotReady, credentials=credentials)

    async def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """One answer, at most `timeout_seconds` long; closing it cancels the call."""
        stub = await self._stub()
        call = stub.Generate(request, timeout=timeout_seconds)
        try:
            async for response in call:
                yield self._connection.checked(response)
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
            return self._connection.checked(await method(request, timeout=SHORT_CALL_SECONDS))
        except grpc.aio.AioRpcError as error:
            raise self._connection.failed(error) from error
