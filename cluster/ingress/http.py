"""The HTTP API: OpenAI's endpoints, served by the gRPC generation service."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from cluster.core import bounds
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest, PilotfishError
from cluster.ingress.access.browsers import OWN_PAGES, BrowserMiddleware, BrowserRules
from cluster.ingress.access.http_access import AccessMiddleware
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.answers import answers, beginning, streamed
from cluster.ingress.asgi import (
    CountMiddleware,
    EventStream,
    RequestCount,
    RequestIdMiddleware,
    timeout_of,
    while_connected,
)
from cluster.ingress.client import ServiceClient
from cluster.ingress.connections.pacing import MarkMiddleware
from cluster.ingress.endpoints.bodies import read_parsed
from cluster.ingress.endpoints.cluster_status import add_cluster_status, add_operations
from cluster.ingress.endpoints.documentation import add_documentation
from cluster.ingress.endpoints.messages import add_messages
from cluster.ingress.endpoints.page import Page, add_page
from cluster.ingress.endpoints.responses import add_responses
from cluster.ingress.endpoints.tokens import add_tokens
from cluster.ingress.endpoints.verification import add_verification
from cluster.ingress.observability.http_middleware import ObservabilityMiddleware, failed, note_error
from cluster.ingress.observability.ingress_metrics import IngressMetrics
from cluster.ingress.observability.traces import CallTracer
from cluster.ingress.openai.errors import ErrorResponse
from cluster.ingress.openai.event_ids import HEADER, EventId, Stage, body_digest, parse_event_id, restore
from cluster.ingress.openai.formats import ChatFormat, Choice, CompletionFormat, EndpointFormat, TokenNames
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest, Parameters
from cluster.ingress.openai.responses import ResponseMetadata, ResponseOptions, model_card, system_fingerprint
from cluster.ingress.openai.stream import chunks, note_prompt, whole_response
from cluster.ingress.openai.translate import (
    chat_request,
    completion_requests,
    parameter_names,
    response_options,
    seed_of,
)
from pilotfish.v1 import generation_pb2

_VERSION = version("pilotfish")


@dataclass(frozen=True, slots=True)
class _Translated:
    """An HTTP request as requests of the generation service."""

    endpoint: EndpointFormat
    event_id: EventId
    """Id and seed of the request, and what an earlier response has sent of it."""
    options: ResponseOptions
    stream: bool
    requests: Sequence[generation_pb2.GenerateRequest]
    """One request per prompt. Their parameters are equal, apart from a seed that was drawn."""
    parameter_names: Mapping[str, str]
    headers: Mapping[str, str]
    """Headers of the response."""

    @property
    def n(self) -> int:
        """Number of answers to each prompt."""
        return self.requests[0].n or 1


def create_app(
    client: ServiceClient,
    limits: LimitsSection,
    *,
    adds_request_id: bool = True,
    keys: KeyRing | None = None,
    metrics: IngressMetrics | None = None,
    tracer: CallTracer | None = None,
    page: Page | None = None,
    browsers: BrowserRules = OWN_PAGES,
) -> FastAPI:
    """Return the ASGI application, which calls the public service through `client`.

    `adds_request_id=False` is for an app behind a proxy that adds the header `x-request-id`, as Ray Serve's does.
    Callers need one of the API `keys`, if there are any. Requests are counted in `metrics` and traced by `tracer`.
    With `page`, a page for people is at `/`. `browsers` says what web pages may do.
    """
    keys, metrics, load = keys or KeyRing(), metrics or IngressMetrics(), RequestCount()
    app = FastAPI(
        title="Pilotfish",
        version=_VERSION,
        docs_url=None,
        redoc_url=None,
        middleware=[
            Middleware(MarkMiddleware, refused=partial(metrics.refused, "http")),
            *browsers.cors(),
            Middleware(RequestIdMiddleware, adds_header=adds_request_id),
            Middleware(ObservabilityMiddleware, metrics=metrics, clock=time.monotonic, tracer=tracer),
            Middleware(BrowserMiddleware, rules=browsers, demands_keys=lambda: keys.demands_keys),
            Middleware(AccessMiddleware, keys=keys, has_page=page is not None),
            Middleware(CountMiddleware, count=load),
        ],
        exception_handlers={
            PilotfishError: _respond_with_error,
            HTTPException: _respond_with_route_error,
            Exception: _respond_with_error,
        },
    )
    _add_generation(app, client, limits)
    add_tokens(app, client, limits)
    add_verification(app, client, limits)
    add_responses(app, client, limits)
    add_messages(app, client, limits)
    add_operations(app, client, metrics, lambda: load.running)
    add_documentation(app)
    add_cluster_status(app, client)
    if page is not None:
        add_page(app, page, lambda: keys.demands_keys)
    return app


def _add_generation(app: FastAPI, client: ServiceClient, limits: LimitsSection) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body, headers = await read_parsed(CompletionRequest, request, limits)
        event_id = _event_id(body, request)
        requests = completion_requests(body, limits, event_id.request_id, event_id.seed)
        options = response_options(body, logprobs=body.logprobs is not None)
        options = replace(options, echo=body.echo, only_echoes=body.only_echoes)
        endpoint = CompletionFormat(TokenNames(body.return_tokens_as_token_ids))
        translated = _translated(endpoint, body, event_id, options, requests, headers)
        return await _generate(client, request, limits, translated)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, headers = await read_parsed(ChatRequest, request, limits)
        event_id = _event_id(body, request)
        requests = [chat_request(body, event_id.request_id, event_id.seed)]
        options = response_options(body, logprobs=body.logprobs)
        translated = _translated(ChatFormat.of(body), body, event_id, options, requests, headers)
        return await _generate(client, request, limits, translated)

    @app.get("/v1/models")
    @app.get("/v1/models/", include_in_schema=False)  # not the model with an empty name
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model_card(model) for model in await client.list_models()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(model_card(await client.get_model(name)))


async def _generate(
    client: ServiceClient, request: Request, limits: LimitsSection, translated: _Translated
) -> Response:
    if translated.event_id.stage is Stage.DONE:
        return Response(media_type=EventStream.media_type)
    # The service checks all bounds. This one also bounds what is made here for each answer.
    n = bounds.integer("n", translated.n, 1, limits.max_n)
    timeout = timeout_of(request, limits.max_timeout_seconds)
    choices = [
        Choice(number * n + index, counts_prompt=index == 0, prompt_text=text)
        for number, text in enumerate(map(_prompt_text, translated.requests))
        for index in range(n)
    ]
    if translated.event_id.choices:
        restore(translated.event_id, choices, translated.requests)
    events = answers(client, translated.requests, timeout, streams=translated.stream)

    async def begin() -> tuple[ResponseMetadata, EventId]:
        index, first = await anext(events)
        if translated.event_id.choices and (first.started.tool_format or first.started.reasoning_format):
            # An id has no text, and the parser of the answer needs all of it.
            raise InvalidRequest(HEADER, "sent", "left out: the answer may have calls of tools or reasoning")
        note_prompt(choices[index], first.started, translated.endpoint, translated.options)
        return _metadata(first, translated), replace(translated.event_id, coordinator=first.started.coordinator)

    names, streams = translated.parameter_names, translated.stream
    async with beginning(request, events, begin(), names, streams=streams) as begun:
        if not streams:
            metadata, _ = begun.result()
            whole = whole_response(events, choices, metadata, translated.options)
            return JSONResponse(await while_connected(request, whole), headers=translated.headers)

    def on_error(error: Exception) -> ErrorResponse:
        if isinstance(error, InvalidRequest):
            error = error.renamed(names.get(error.field, error.field))
        return failed(request, error)

    parts = chunks(begun, events, choices, translated.options, on_error)
    return streamed(parts, translated.headers, begun, events)


def _prompt_text(request: generation_pb2.GenerateRequest) -> str:
    """Return a prompt that the answer begins with, where it is sent as text and used as a whole; empty otherwise."""
    options = request.prompt_options
    return request.text if options.echo and not options.HasField("truncate") else ""


def _metadata(first: generation_pb2.GenerateResponse, translated: _Translated) -> ResponseMetadata:
    return ResponseMetadata(
        translated.endpoint,
        f"{translated.endpoint.id_prefix}-{translated.event_id.request_id}",
        translated.event_id.created,
        first.started.model,
        translated.event_id.seed,
        system_fingerprint(first.started),
        is_lossless=not first.lossy,
    )


def _event_id(body: Parameters, request: Request) -> EventId:
    """Return what the client sent as the id of its last event, or the state before the first event."""
    header = request.headers.get(HEADER)
    if header is None:
        request_id: str = request.state.request_id if body.request_id is None else body.request_id
        return EventId(request_id, seed_of(body), int(time.time()), "")
    if not body.stream:
        raise InvalidRequest(HEADER, header, "left out unless stream is true")
    return parse_event_id(header)


def _translated(
    endpoint: EndpointFormat,
    body: Parameters,
    event_id: EventId,
    options: ResponseOptions,
    requests: Sequence[generation_pb2.GenerateRequest],
    headers: Mapping[str, str],
) -> _Translated:
    """Raises `InvalidRequest` (`Last-Event-ID`) if the id belongs to another body."""
    digest = body_digest(requests, endpoint.id_prefix, body.seed, options)
    if event_id.body not in ("", digest):
        raise InvalidRequest(HEADER, event_id.request_id, "the id of an event of a response to the same body")
    event_id = replace(event_id, body=digest)
    return _Translated(endpoint, event_id, options, body.stream, requests, parameter_names(body), headers)


async def _respond_with_error(request: Request, error: Exception) -> Response:
    return failed(request, error).response(request.scope)


async def _respond_with_route_error(request: Request, error: Exception) -> Response:
    """Convert an error of the router, such as an unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    note_error(request, "UnknownRoute")
    reason = {404: "there is no", 405: "there is no such method:"}.get(status, "refused:")
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    message = f"{reason} {request.method} {request.url.path}"
    return ErrorResponse(status, message, "invalid_request_error", headers=headers).response(request.scope)
