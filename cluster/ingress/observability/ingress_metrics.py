"""The Prometheus metrics of one ingress: HTTP requests, and what both APIs refuse."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from cluster.ingress.router.metrics_text import merged

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class IngressMetrics:
    """Metrics in a registry of their own. With `replica`, every series has it as a label, as a coordinator's id is.

    Each ingress counts what it has served itself.
    """

    def __init__(self, replica: str = "") -> None:
        self.registry = CollectorRegistry()
        self._replica = replica
        self._requests = Counter(
            "http_requests",
            "Number of HTTP requests, by route, method and class of the status.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time from an HTTP request's arrival to the last byte of its response, in seconds.",
            ("handler", "method", "status"),
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._refusals = Counter(
            "pilotfish:refusals",
            "Number of requests that were refused or ended with an error, by API and error.",
            ("api", "reason"),
            registry=self.registry,
        )

    def answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP request. `handler` is the path of its route; statuses count by class, as in `2xx`."""
        labels = (handler, method, f"{status // 100}xx")
        self._requests.labels(*labels).inc()
        self._seconds.labels(*labels).observe(seconds)

    def refused(self, api: str, reason: str, count: int = 1) -> None:
        """Count requests over `http` or `grpc` that were refused or ended with an error."""
        self._refusals.labels(api, reason).inc(count)

    def refused_over_grpc(self, error: Exception) -> None:
        """Count a call of the gRPC API that ended with an error."""
        self.refused("grpc", type(error).__name__)

    def appended_to(self, exposition: bytes) -> bytes:
        """Return the metrics of coordinators with these behind them, in Prometheus' text format."""
        own = generate_latest(self.registry)
        return exposition + (merged({self._replica: own}) if self._replica else own)
