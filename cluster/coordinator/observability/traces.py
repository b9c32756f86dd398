"""What the coordinator tells a tracer of requests. Without a tracer, nothing is collected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from cluster.coordinator.requests.live_request import LiveRequest


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """When the stages of a round took place, in seconds on the coordinator's clock."""

    propose: float | None
    """Begin of the wait for drafts; `None` if none were asked for."""
    verify: float
    """Begin of the step."""
    emit: float
    """End of the step, when tokens are committed and handed to the readers."""
    end: float


class RequestTracer(Protocol):
    """Makes spans of requests."""

    def begin(self, request: LiveRequest) -> None:
        """A request was admitted."""
        ...

    def round_decided(self, requests: Iterable[LiveRequest]) -> None:
        """A step has decided tokens of these requests. They are emitted next."""
        ...

    def round_ended(self, times: RoundTimes) -> None:
        """The tokens of the latest step are emitted."""
        ...

    def end(self, request: LiveRequest, now: float, error: Exception | None) -> None:
        """A request has ended."""
        ...
