"""Spans of requests with OpenTelemetry. Only a process that traces imports this file."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.coordinator.requests.live_request import LiveRequest
from cluster.core.ids import RequestId
from cluster.speculation.observation import RoundRecord

MOST_ROUNDS = 256
"""Rounds of one request that have spans. Those of later rounds are left out and counted."""
TRACEPARENT = "traceparent"


@dataclass(slots=True)
class _Traced:
    """The span of a live request."""

    span: Span
    rounds: int = 0


class OtelTracer:
    """A span for each request, with spans for queue, prefill and decode, and for propose, verify and emit of rounds.

    The parent of a request's span is the one that its client names. What is not sampled takes no memory.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("pilotfish.coordinator")
        self._offset = time.time() - time.monotonic()  # the coordinator's clock is monotonic
        self._propagator = TraceContextTextMapPropagator()
        self._spans: dict[RequestId, _Traced] = {}
        self._in_round: list[_Traced] = []
        self._ended: list[tuple[_Traced, int]] = []

    def begin(self, request: LiveRequest) -> None:
        """Start the span of a request, unless it is not sampled."""
        wanted = request.request
        parent = self._propagator.extract({TRACEPARENT: wanted.traceparent} if wanted.traceparent else {})
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": str(wanted.request_id),
            "gen_ai.request.max_tokens": wanted.stopping.max_tokens,
            "gen_ai.request.temperature": wanted.sampling.temperature,
            "gen_ai.request.n": wanted.n,
            "gen_ai.usage.prompt_tokens": len(wanted.prompt),
        }
        begun = self._nanoseconds(request.arrived_at)
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, attributes, start_time=begun)
        if span.is_recording():
            self._spans[request.id] = _Traced(span)

    def round_decided(self, request_ids: Iterable[RequestId]) -> None:
        """Keep the requests that are traced until the round ends. Those that end meanwhile end after it."""
        self._complete()
        ids = dict.fromkeys(request_ids)
        self._in_round = [traced for request_id in ids if (traced := self._spans.get(request_id)) is not None]

    def round_ended(self, record: RoundRecord) -> None:
        """Add the spans of a round to each request that is traced."""
        times = record.times
        stages = [("verify", times.verify, times.commit), ("emit", times.commit, times.end)]
        if record.drafts.asked:
            stages.insert(0, ("propose", times.propose, times.verify))
        for traced in self._in_round:
            traced.rounds += 1
            if traced.rounds <= MOST_ROUNDS:
                for name, begun, ended in stages:
                    self._add(traced.span, name, begun, ended)
        self._in_round = []
        self._complete()

    def end(self, request: LiveRequest, now: float, error: Exception | None) -> None:
        """End the span of a request, with what it took."""
        traced = self._spans.pop(request.id, None)
        if traced is None:
            return
        span, timing = traced.span, request.timing(now)
        running = request.arrived_at + timing.queue
        first = running + timing.prefill
        self._add(span, "queue", request.arrived_at, running)
        if request.has_run:
            self._add(span, "prefill", running, first)
        if request.token_count:
            self._add(span, "decode", first, now)
        span.set_attribute("gen_ai.usage.completion_tokens", request.token_count)
        for name in ("queue", "prefill", "decode"):
            span.set_attribute(f"gen_ai.latency.time_in_{name}", getattr(timing, name))
        if error is not None:
            span.set_status(StatusCode.ERROR, type(error).__name__)
        self._ended.append((traced, self._nanoseconds(now)))
        if not self._in_round:
            self._complete()

    def _complete(self) -> None:
        """End the spans of requests that have ended."""
        for traced, at in self._ended:
            traced.span.set_attribute("pilotfish.rounds", traced.rounds)
            traced.span.end(at)
        self._ended.clear()

    def _add(self, parent: Span, name: str, begun: float, ended: float) -> None:
        context = set_span_in_context(parent)
        span = self._tracer.start_span(name, context, start_time=self._nanoseconds(begun))
        span.end(self._nanoseconds(ended))

    def _nanoseconds(self, seconds: float) -> int:
        """Convert a time of the coordinator's clock to nanoseconds since the epoch."""
        return round((seconds + self._offset) * 1e9)
