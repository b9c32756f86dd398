"""What every stage of the coordinator records with: the clock, the metrics and the tracer of requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.coordinator.metrics import Metrics
from cluster.coordinator.observability.traces import NoTracer, RequestTracer


@dataclass(frozen=True, slots=True)
class Instruments:
    """Clock, metrics and tracer."""

    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    """The present time in seconds, of a clock that never goes back."""
    tracer: RequestTracer = field(default_factory=NoTracer)
