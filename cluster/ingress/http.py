"""The HTTP door: OpenAI's API over the public gRPC service."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from cluster.core.config import LimitsSection
from cluster.core.errors import PilotfishError, WorkerUnavailable
from cluster.ingress.asgi import EventStream, NamedRequests, read_body, timeout_of, while_connected
from cluster.ingress.client import Client
from cluster.ingress.merge import merge
from cluster.ingress.openai.errors import Failure, failure
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest, Parameters, parse
from cluster.ingress.openai.responses import (
    ChatShape,
    Choice,
    CompletionShape,
    Envelope,
    Json,
    Shape,
    Wishes,
    delta_choice,
    last_choice,
    model_card,
    take_delta,
    usage,
    whole_choice,
)
from cluster.ingress.openai.translate import chat_request, completion_requests, seed_of
from pilotfish.v1 import generation_pb2

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_FINGERPRINT = f"pilotfish-{version('pilotfish')}"

Events = AsyncGenerator[tuple[int, generation_pb2.GenerateResponse], None]


@dataclass(frozen=True, slots=True)
class _Ask:
    """One HTTP request, translated."""

    shape: Shape
    name: str
    seed: int
    wishes: Wishes
    stream: bool
    requests: Sequence[generation_pb2.GenerateRequest]
    """One per prompt, alike in all else."""

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return self.requests[0].n or 1


def create_app(client: Client, limits: LimitsSection) -> FastAPI:
    """The ASGI application; `client` reaches the coordinator's public service."""
    app = FastAPI(
        title="Pilotfish",
        version=version("pilotfish"),
        docs_url=None,
        redoc_url=None,
        middleware=[Middleware(NamedRequests)],
        exception_handlers={
            PilotfishError: _refuse,
            HTTPException: _refuse_route,
            Exception: _refuse,
        },
    )
    _add_generation(app, client, limits)
    _add_operations(app, client)
    return app


def _add_generation(app: FastAPI, client: Client, limits: LimitsSection) -> None:
    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = parse(CompletionRequest, await read_body(request, limits.max_body_bytes))
        name, seed = _name(body, request), seed_of(body)
        requests = completion_requests(body, limits, name, seed)
        wishes = Wishes(body.logprobs is not None, body.return_token_ids, body.include_usage)
        ask = _Ask(CompletionShape(), name, seed, wishes, body.stream, requests)
        return await _answer(client, request, limits, ask)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = parse(ChatRequest, await read_body(request, limits.max_body_bytes))
        name, seed = _name(body, request), seed_of(body)
        requests = [chat_request(body, limits, name, seed)]
        wishes = Wishes(body.logprobs, body.return_token_ids, body.include_usage)
        ask = _Ask(ChatShape(), name, seed, wishes, body.stream, requests)
        return await _answer(client, request, limits, ask)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model_card(model) for model in await client.list_models()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(model_card(await client.get_model(name)))


def _add_operations(app: FastAPI, client: Client) -> None:
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


async def _answer(client: Client, request: Request, limits: LimitsSection, ask: _Ask) -> Response:
    timeout = timeout_of(request, limits.max_timeout_seconds)
    events = _flat(merge([client.generate(part, timeout) for part in ask.requests]), ask.n)
    choices = [Choice(index, leads=index % ask.n == 0) for index in range(len(ask.requests) * ask.n)]
    try:
        # Every refusal comes before the first event, and so before the status line.
        _, first = await while_connected(request, _next(events))
        started = first.started
        envelope = Envelope(
            ask.shape,
            f"{ask.shape.prefix}-{ask.name}",
            int(time.time()),
            started.model,
            ask.seed,
            _FINGERPRINT,
            is_lossless=not first.lossy,
        )
        if not ask.stream:
            return JSONResponse(await while_connected(request, _whole(events, choices, envelope, ask.wishes)))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(_chunks(events, choices, envelope, ask.wishes, request.state.called))


def _name(body: Parameters, request: Request) -> str:
    name: str = request.state.name if body.request_id is None else body.request_id
    return name


async def _flat(events: Events, n: int) -> Events:
    """Events with the index of their choice instead of their prompt: `n` follow each other for each prompt."""
    async with aclosing(events):
        async for prompt, event in events:
            if event.index >= n:
                raise WorkerUnavailable(f"answer {event.index} was not asked for")
            yield prompt * n + event.index, event


async def _next(events: Events) -> tuple[int, generation_pb2.GenerateResponse]:
    return await anext(events)


async def _whole(events: Events, choices: list[Choice], envelope: Envelope, wishes: Wishes) -> Json:
    async for index, event in events:
        if event.HasField("delta"):
            take_delta(envelope.shape, choices[index], event.delta)
        elif event.HasField("finished"):
            choices[index].finished = event.finished
    answers = [whole_choice(envelope.shape, choice, wishes) for choice in choices]
    return envelope.wrap(answers, chunk=False, usage=usage(choices))


async def _chunks(
    events: Events, choices: list[Choice], envelope: Envelope, wishes: Wishes, called: str
) -> AsyncGenerator[bytes, None]:
    """Server-sent events: one per commit as it arrives, the usage if wished, `[DONE]`."""
    unset = {"usage": None} if wishes.usage else {}
    try:
        async for index, event in events:
            piece = _piece(envelope.shape, choices[index], event, wishes)
            if piece is not None:
                yield _sse(envelope.wrap([piece], chunk=True, **unset))
        if wishes.usage:
            yield _sse(envelope.wrap([], chunk=True, usage=usage(choices)))
    except Exception as error:
        yield b"data: " + _failure(called, error).body() + b"\n\n"
    finally:
        await events.aclose()
    yield _DONE


def _piece(shape: Shape, choice: Choice, event: generation_pb2.GenerateResponse, wishes: Wishes) -> Json | None:
    if event.HasField("delta"):
        return delta_choice(shape, choice, event.delta, wishes)
    if event.HasField("finished"):
        choice.finished = event.finished
        return last_choice(shape, choice)
    return None


def _sse(payload: Json) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _failure(called: str, error: Exception) -> Failure:
    if not isinstance(error, PilotfishError):
        logger.error("request %s failed", called, exc_info=error)
    return failure(error)


async def _refuse(request: Request, error: Exception) -> Response:
    return _response(_failure(request.state.called, error))


async def _refuse_route(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    reason = {404: "there is no", 405: "there is no such method:"}.get(status, "refused:")
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return _response(
        Failure(status, f"{reason} {request.method} {request.url.path}", "invalid_request_error", headers=headers)
    )


def _response(refusal: Failure) -> Response:
    return Response(refusal.body(), refusal.status, refusal.headers, "application/json")


def _body_schema(schema: type[Parameters]) -> Json:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema.model_json_schema()}}}}
