"""The HTTP API: OpenAI's endpoints, served by the gRPC generation service."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest, PilotfishError
from cluster.ingress.asgi import EventStream, RequestIdMiddleware, read_body, timeout_of, while_connected
from cluster.ingress.client import ServiceClient
from cluster.ingress.merge import merge
from cluster.ingress.openai.errors import ErrorResponse, error_response
from cluster.ingress.openai.formats import ChatFormat, Choice, CompletionFormat, EndpointFormat, Json
from cluster.ingress.openai.parse import parse
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest, Parameters
from cluster.ingress.openai.responses import ResponseMetadata, ResponseOptions, model_card
from cluster.ingress.openai.stream import Events, by_choice, chunks, whole_response
from cluster.ingress.openai.translate import chat_request, completion_requests, parameter_names, seed_of
from pilotfish.v1 import generation_pb2

logger = logging.getLogger(__name__)

_FINGERPRINT = f"pilotfish-{version('pilotfish')}"


@dataclass(frozen=True, slots=True)
class _Translated:
    """An HTTP request as requests of the generation service."""

    endpoint: EndpointFormat
    request_id: str
    seed: int
    options: ResponseOptions
    stream: bool
    requests: Sequence[generation_pb2.GenerateRequest]
    """One request per prompt, with equal parameters."""
    parameter_names: Mapping[str, str]

    @property
    def n(self) -> int:
        """Number of answers to each prompt."""
        return self.requests[0].n or 1


def create_app(client: ServiceClient, limits: LimitsSection, *, adds_request_id: bool = True) -> FastAPI:
    """Return the ASGI application, which calls the public service through `client`.

    `adds_request_id=False` is for an app behind a proxy that adds the header `x-request-id`, as Ray Serve's does.
    """
    app = FastAPI(
        title="Pilotfish",
        version=version("pilotfish"),
        docs_url=None,
        redoc_url=None,
        middleware=[Middleware(RequestIdMiddleware, adds_header=adds_request_id)],
        exception_handlers={
            PilotfishError: _respond_with_error,
            HTTPException: _respond_with_route_error,
            Exception: _respond_with_error,
        },
    )
    _add_generation(app, client, limits)
    _add_operations(app, client)
    return app


def _add_generation(app: FastAPI, client: ServiceClient, limits: LimitsSection) -> None:
    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = parse(CompletionRequest, await read_body(request, limits.max_body_bytes))
        request_id, seed = _request_id(body, request), seed_of(body)
        requests = completion_requests(body, limits, request_id, seed)
        options = ResponseOptions(body.logprobs is not None, body.return_token_ids, body.include_usage)
        names = parameter_names(body)
        translated = _Translated(CompletionFormat(), request_id, seed, options, body.stream, requests, names)
        return await _generate(client, request, limits, translated)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = parse(ChatRequest, await read_body(request, limits.max_body_bytes))
        request_id, seed = _request_id(body, request), seed_of(body)
        requests = [chat_request(body, request_id, seed)]
        options = ResponseOptions(body.logprobs, body.return_token_ids, body.include_usage)
        names = parameter_names(body)
        translated = _Translated(ChatFormat(), request_id, seed, options, body.stream, requests, names)
        return await _generate(client, request, limits, translated)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model_card(model) for model in await client.list_models()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(model_card(await client.get_model(name)))


def _add_operations(app: FastAPI, client: ServiceClient) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/ready")
    async def ready() -> Response:
        is_ready = await client.is_ready()
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        exposition, content_type = await client.metrics()
        return Response(exposition, headers={"content-type": content_type})


async def _generate(
    client: ServiceClient, request: Request, limits: LimitsSection, translated: _Translated
) -> Response:
    timeout, n = timeout_of(request, limits.max_timeout_seconds), translated.n
    events = by_choice(merge([client.generate(part, timeout) for part in translated.requests]), n)
    choices = [Choice(index, counts_prompt=index % n == 0) for index in range(len(translated.requests) * n)]
    try:
        # A refused request fails here, before the status line is sent.
        metadata = _metadata(await while_connected(request, _first(events)), translated)
        if not translated.stream:
            return JSONResponse(
                await while_connected(request, whole_response(events, choices, metadata, translated.options))
            )
    except InvalidRequest as error:
        await events.aclose()
        raise error.renamed(translated.parameter_names.get(error.field, error.field)) from None
    except BaseException:
        await events.aclose()
        raise

    def in_stream(error: Exception) -> ErrorResponse:
        return _logged(request, error)

    return EventStream(chunks(events, choices, metadata, translated.options, in_stream))


async def _first(events: Events) -> generation_pb2.GenerateResponse:
    return (await anext(events))[1]


def _metadata(first: generation_pb2.GenerateResponse, translated: _Translated) -> ResponseMetadata:
    return ResponseMetadata(
        translated.endpoint,
        f"{translated.endpoint.id_prefix}-{translated.request_id}",
        int(time.time()),
        first.started.model,
        translated.seed,
        _FINGERPRINT,
        is_lossless=not first.lossy,
    )


def _request_id(body: Parameters, request: Request) -> str:
    request_id: str = request.state.request_id if body.request_id is None else body.request_id
    return request_id


def _logged(request: Request, error: Exception) -> ErrorResponse:
    if not isinstance(error, PilotfishError):
        logger.error("request %s failed", request.state.client_request_id, exc_info=error)
    return error_response(error)


async def _respond_with_error(request: Request, error: Exception) -> Response:
    return _response(_logged(request, error))


async def _respond_with_route_error(request: Request, error: Exception) -> Response:
    """Convert an error of the router, such as an unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    reason = {404: "there is no", 405: "there is no such method:"}.get(status, "refused:")
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    message = f"{reason} {request.method} {request.url.path}"
    return _response(ErrorResponse(status, message, "invalid_request_error", headers=headers))


def _response(error: ErrorResponse) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


def _body_schema(model: type[Parameters]) -> Json:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}
