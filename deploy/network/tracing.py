"""Sends spans to an OpenTelemetry collector. Only a process that traces imports OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.coordinator.observability.traces import RequestTracer
from cluster.core.errors import ConfigurationError
from cluster.ingress.observability.traces import CallTracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def tracer_provider(endpoint: str, service_name: str) -> TracerProvider:
    """Return a provider that sends spans in batches over OTLP with gRPC. Shut it down to send the last ones.

    Raises `ConfigurationError` without OpenTelemetry's packages.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            f"server.otlp_endpoint: {endpoint!r} needs OpenTelemetry, and {error.name} is not installed; "
            "run `pip install 'pilotfish[tracing]'`"
        ) from None

    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service_name}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def make_tracer(provider: TracerProvider) -> RequestTracer:
    """Return what makes the spans of a coordinator."""
    from cluster.coordinator.observability.otel_tracer import OtelTracer

    return OtelTracer(provider)


def make_call_tracer(provider: TracerProvider) -> CallTracer:
    """Return what makes the spans of an ingress."""
    from cluster.ingress.observability.otel_calls import OtelCallTracer

    return OtelCallTracer(provider)
