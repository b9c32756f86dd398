"""Spans of HTTP requests with OpenTelemetry. Only a process that traces imports this file."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.wire.request_values import TRACEPARENT

_SERVER_ERROR = 500


class OtelCallTracer:
    """A span for each HTTP request, below the span that the header `traceparent` names."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("pilotfish.ingress")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, traceparent: str) -> OtelCallSpan:
        """Start a span. A header that is not in W3C's form counts as none."""
        parent = self._propagator.extract({TRACEPARENT: traceparent} if traceparent else {})
        return OtelCallSpan(self._tracer.start_span("http", parent, SpanKind.SERVER), self._propagator)


class OtelCallSpan:
    """The span of one HTTP request."""

    def __init__(self, span: Span, propagator: TraceContextTextMapPropagator) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        propagator.inject(carrier, set_span_in_context(span))
        self.traceparent = carrier.get(TRACEPARENT, "")

    def end(self, name: str, status: int, error: str | None) -> None:
        self._span.update_name(name)
        self._span.set_attribute("http.response.status_code", status)
        if error is not None:
            self._span.set_attribute("error.type", error)
        if status >= _SERVER_ERROR:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
