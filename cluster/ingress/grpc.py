"""The gRPC servicer of an ingress: passes every call on to the coordinators."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias

import grpc

from cluster.core.ids import check_request_id, is_request_id
from cluster.ingress.client import FullClient
from cluster.ingress.observability.request_record import Fields, RequestRecord, log_request
from cluster.wire.request_values import traceparent_of
from pilotfish.v1 import generation_pb2, generation_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class RoutedGenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The public service of an ingress. It passes every call on, and raises the errors of `client`."""

    def __init__(self, client: FullClient, max_timeout_seconds: float, *, traces: bool = False) -> None:
        """`max_timeout_seconds` is the timeout of a `Generate` call without a deadline, and the longest one.

        `traces` says whether the `traceparent` in the metadata of calls is read, as the parent of a request's span.
        """
        self._traces = traces
        self._client = client
        self._max_timeout_seconds = max_timeout_seconds

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream the answers. A cancelled call frees their memory."""
        if self._traces:
            request.traceparent = traceparent_of(context.invocation_metadata()) or request.traceparent
        left, longest = context.time_remaining(), self._max_timeout_seconds
        timeout = longest if left is None else min(left, longest)
        with _logged(request) as record:
            record.note_request(request)
            async with aclosing(self._client.generate(request, timeout)) as responses:
                async for response in responses:
                    record.note(response)
                    yield response

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        """Abort a running request."""
        request_id = check_request_id(request.request_id)
        return generation_pb2.AbortResponse(aborted=await self._client.abort(request_id, request.client))

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        """Convert a text or a conversation to token ids."""
        return await self._client.tokenize(request)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        """Convert token ids to text."""
        return await self._client.detokenize(request)

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: Context
    ) -> generation_pb2.ListModelsResponse:
        """Return the served models."""
        return generation_pb2.ListModelsResponse(models=await self._client.list_models())

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: Context
    ) -> generation_pb2.GetModelResponse:
        """Return one model by name."""
        return generation_pb2.GetModelResponse(model=await self._client.get_model(request.model))


@contextmanager
def _logged(request: generation_pb2.GenerateRequest) -> Iterator[RequestRecord]:
    """Yield the record of a call, and log one line at its end."""
    record = RequestRecord(time.monotonic)
    try:
        yield record
    except (asyncio.CancelledError, GeneratorExit):
        record.error = "Cancelled"
        raise
    except Exception as error:
        record.error = type(error).__name__
        raise
    finally:
        own = request.request_id if is_request_id(request.request_id) else None  # what is refused may be any text
        begin: Fields = {"request_id": record.answer_id or own, "api": "grpc", "method": "Generate"}
        log_request(begin | record.fields())
