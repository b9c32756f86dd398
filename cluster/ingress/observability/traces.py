"""What an ingress tells a tracer of HTTP requests. Without a tracer, nothing is collected."""

from __future__ import annotations

from typing import Protocol


class CallSpan(Protocol):
    """The span of one request."""

    @property
    def traceparent(self) -> str:
        """The span as the parent of others, in W3C's form."""

    def end(self, name: str, status: int, error: str | None) -> None:
        """End the span. `error` is the name of the error that ended the request."""


class CallTracer(Protocol):
    """Makes spans of requests."""

    def begin(self, traceparent: str) -> CallSpan:
        """Start the span of a request whose caller names its own span, or none."""
