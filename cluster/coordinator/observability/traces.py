"""What the coordinator tells a tracer of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cluster.coordinator.requests.live_request import LiveRequest
from cluster.core.ids import RequestId
from cluster.speculation.observation import RoundRecord


class RequestTracer(Protocol):
    """Makes spans of requests."""

    def begin(self, request: LiveRequest) -> None:
        """A request was admitted."""

    def round_decided(self, request_ids: Iterable[RequestId]) -> None:
        """A step has decided tokens of these requests, which may repeat. They are emitted next."""

    def round_ended(self, record: RoundRecord) -> None:
        """The tokens of the latest step are emitted."""

    def end(self, request: LiveRequest, now: float, error: Exception | None) -> None:
        """A request has ended."""


class NoTracer:
    """Traces nothing. It does not even look at the requests of a round."""

    def begin(self, request: LiveRequest) -> None:
        """Record nothing."""

    def round_decided(self, request_ids: Iterable[RequestId]) -> None:
        """Record nothing."""

    def round_ended(self, record: RoundRecord) -> None:
        """Record nothing."""

    def end(self, request: LiveRequest, now: float, error: Exception | None) -> None:
        """Record nothing."""
