"""Counts and logs every HTTP request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.core.errors import Aborted, PilotfishError
from cluster.ingress.observability.ingress_metrics import IngressMetrics
from cluster.ingress.observability.request_record import RequestRecord, current, log_request
from cluster.ingress.observability.traces import CallTracer
from cluster.ingress.openai.errors import ErrorResponse, error_response
from cluster.wire.request_values import TRACEPARENT

logger = logging.getLogger(__name__)

UNLOGGED = frozenset({"/health", "/ping", "/ready", "/metrics", "/load", "/version"})
"""Routes that probes and collectors ask for again and again. They are counted and not logged."""
_UNKNOWN = "none"
"""The label of a request that matches no route. Its path is the client's text, so it is neither counted nor logged."""


class ObservabilityMiddleware:
    """Measures every HTTP request from its arrival to the last byte of its response, and logs one line.

    It also answers a request that fails unexpectedly, with status 500: further out, the response would lack the
    headers that every response has.
    """

    def __init__(
        self, app: ASGIApp, metrics: IngressMetrics, clock: Callable[[], float], tracer: CallTracer | None = None
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app. Raises an unexpected error of a response that has begun."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None
        state = scope.setdefault("state", {})
        record = state["record"] = RequestRecord(self._clock)

        span = None if self._tracer is None else self._tracer.begin(Headers(scope=scope).get(TRACEPARENT, ""))
        record.traceparent = "" if span is None else span.traceparent

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            await send(message)

        client = _Client(receive)
        token = current.set(record)
        try:
            await self._app(scope, client.receive, send_and_note)
        except asyncio.CancelledError as error:  # Ray Serve cancels the call of a client that has left, and others
            has_left = client.has_left()
            record.error = (Aborted if has_left else type(error)).__name__
            if status is None and has_left:
                status = Aborted.http_status
            raise
        except Exception as error:
            record.error = type(error).__name__
            if status is not None:
                raise
            await failed(Request(scope), error).response(scope)(scope, receive, send_and_note)
        finally:
            current.reset(token)
            name = self._ended(scope, record, status or 500)
            if span is not None:
                span.end(name, status or 500, record.error)

    def _ended(self, scope: Scope, record: RequestRecord, status: int) -> str:
        """Count and log a request. Returns its method and route."""
        handler, method = getattr(scope.get("route"), "path", _UNKNOWN), _method(scope)
        self._metrics.answered(handler, method, status, record.seconds)
        if record.error is not None:
            self._metrics.refused("http", record.error)
        if handler not in UNLOGGED:
            request_id = scope["state"].get("client_request_id")
            log_request(
                {"request_id": request_id, "api": "http", "method": method, "handler": handler, "status": status}
                | record.fields()
            )
        return f"{method} {handler}"


class _Client:
    """What the client of one request sends, and whether it has left."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._has_left |= message["type"] == "http.disconnect"
        return message

    def has_left(self) -> bool:
        """Whether a message says so, among those that were received and those that can be without waiting."""
        while not self._has_left:
            receiving = self.receive().__await__()
            try:
                next(receiving)
            except StopIteration:
                continue
            except Exception:  # whatever a lost connection raises
                return False
            receiving.close()
            return False
        return True


def note_error(request: Request | Scope, error: Exception | str) -> None:
    """Record the error that ends an HTTP request."""
    scope = request.scope if isinstance(request, Request) else request
    record = scope.get("state", {}).get("record")
    if record is not None:
        record.error = error if isinstance(error, str) else type(error).__name__


def note_client(scope: Scope, name: str) -> None:
    """Record the name of the caller's API key."""
    record = scope.get("state", {}).get("record")
    if record is not None:
        record.client = name


def failed(request: Request, error: Exception) -> ErrorResponse:
    """Record the error that ends an HTTP request, and log it if it is not expected. Returns the response to it."""
    note_error(request, error)
    if not isinstance(error, PilotfishError):
        logger.error("request %s failed", request.state.client_request_id, exc_info=error)
    return error_response(error)


def _method(scope: Scope) -> str:
    """Return the method; any that HTTP does not define counts as one."""
    method = str(scope["method"])
    return method if method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} else "other"
