"""Spans of requests, collected in memory: their parents, their order, and that nothing is there without a tracer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.observability.otel_tracer import OtelTracer
from cluster.core.errors import DeadlineExceeded
from cluster.core.request import GenerationRequest
from cluster.generation.servicer import GenerationServicer
from cluster.ingress.http import create_app
from cluster.ingress.observability.otel_calls import OtelCallTracer
from cluster.wire.request_values import traceparent_of
from pilotfish.v1 import generation_pb2
from tests.support.fakes.fake_cluster import all_tokens, configure, first_commit_then_leave, request
from tests.support.fakes.fake_drafters import PerfectDrafter
from tests.support.fakes.fake_engine import Remaining
from tests.support.fakes.fake_target import FakeTarget
from tests.support.fakes.http_app import HI, LIMITS, HttpApi

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


def traced(name: str, traceparent: str = SAMPLED, **values: Any) -> GenerationRequest:
    wanted = request(name, **values)
    return GenerationRequest(
        wanted.request_id, wanted.prompt, wanted.sampling, wanted.stopping, wanted.deadline, traceparent=traceparent
    )


def spans(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def identity(span: ReadableSpan) -> tuple[str, str | None]:
    """The trace of a span, and its parent."""
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    return f"{context.trace_id:032x}", None if parent is None else f"{parent.span_id:016x}"


async def test_a_request_has_spans_of_its_phases_and_rounds_below_its_caller_s(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    target = FakeTarget()
    tracer = OtelTracer(provider)
    async with Coordinator(target, [PerfectDrafter(target)], configure(), Metrics(), tracer=tracer) as coordinator:
        await all_tokens(coordinator, [traced("r", max_tokens=20)])
    (root,) = spans(exporter, "llm_request")
    assert identity(root) == (TRACE, PARENT)
    context = root.get_span_context()
    assert context is not None and root.attributes is not None
    rounds = root.attributes["pilotfish.rounds"]
    counts = {name: len(spans(exporter, name)) for name in ("queue", "prefill", "decode", "propose", "verify", "emit")}
    assert isinstance(rounds, int) and 1 < rounds < 20
    assert (counts["queue"], counts["prefill"], counts["decode"]) == (1, 1, 1)
    assert counts["verify"] == counts["emit"] == rounds
    assert 0 < counts["propose"] <= rounds
    for name in counts:
        for span in spans(exporter, name):
            assert identity(span) == (TRACE, f"{context.span_id:016x}")
            assert root.start_time is not None and span.start_time is not None
            assert root.start_time - 1000 <= span.start_time
    phases = [spans(exporter, name)[0] for name in ("queue", "prefill", "decode")]
    assert phases[0].end_time == phases[1].start_time and phases[1].end_time == phases[2].start_time
    assert root.attributes["gen_ai.usage.completion_tokens"] == 20


async def test_requests_that_are_not_sampled_or_leave_take_nothing(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    target = FakeTarget()
    tracer = OtelTracer(provider)
    async with Coordinator(target, [PerfectDrafter(target)], configure(), Metrics(), tracer=tracer) as coordinator:
        await all_tokens(coordinator, [traced("unsampled", UNSAMPLED)])
        assert not exporter.get_finished_spans()
        await first_commit_then_leave(coordinator, traced("leaves", max_tokens=100))
        with pytest.raises(DeadlineExceeded):
            await all_tokens(coordinator, [traced("late", max_tokens=100, deadline=0.0)])
    assert len(spans(exporter, "llm_request")) == 1
    assert not tracer._spans


async def test_a_wrong_traceparent_is_none(provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
    target = FakeTarget()
    tracer = OtelTracer(provider)
    async with Coordinator(target, [PerfectDrafter(target)], configure(), Metrics(), tracer=tracer) as coordinator:
        await all_tokens(coordinator, [traced("r", "00-wrong")])
    assert identity(spans(exporter, "llm_request")[0])[1] is None


async def test_an_http_request_is_a_span_and_its_coordinator_s_are_below(
    tmp_path: Path, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    api = HttpApi(tmp_path)
    app = create_app(api.client, LIMITS, tracer=OtelCallTracer(provider))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pilotfish") as http:
        await http.post("/v1/chat/completions", json={"messages": HI}, headers={"traceparent": SAMPLED})
        await http.get("/nowhere/secret")
    answered, unknown = exporter.get_finished_spans()
    assert (answered.name, unknown.name) == ("POST /v1/chat/completions", "GET none")
    assert identity(answered) == (TRACE, PARENT)
    context = answered.get_span_context()
    assert context is not None
    assert api.engine.requests[-1].traceparent == f"00-{TRACE}-{context.span_id:016x}-01"
    assert unknown.attributes is not None
    assert (unknown.attributes["http.response.status_code"], unknown.attributes["error.type"]) == (404, "UnknownRoute")


async def test_the_metadata_of_a_grpc_call_names_the_span(tmp_path: Path) -> None:
    class Context(Remaining):
        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return (("traceparent", SAMPLED),)

    api = HttpApi(tmp_path)
    for traces, expected in ((True, SAMPLED), (False, "")):
        servicer = GenerationServicer(api.client._servicer._service, traces=traces)
        async for _ in servicer.Generate(generation_pb2.GenerateRequest(text="hi"), Context(9)):  # type: ignore[arg-type]
            pass
        assert api.engine.requests[-1].traceparent == expected


def test_metadata_that_cannot_be_right_counts_as_none() -> None:
    assert traceparent_of(None) == ""
    assert traceparent_of((("traceparent", "0" * 65), ("other", SAMPLED))) == ""


def test_a_process_that_does_not_trace_imports_nothing_that_makes_or_sends_spans() -> None:
    program = (
        "import sys, deploy.coordinator_server, cluster.ingress.http\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter', 'observability.otel')\n"
        "sys.exit(any(part in name for name in sys.modules for part in parts))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
