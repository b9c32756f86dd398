"""The coordinator's metrics as plain sums. Prometheus' own are too slow for thousands of simulated coordinators."""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Callable, Sequence
from typing import Any

from cluster.coordinator.metrics import Metrics


class _Series:
    """A counter, gauge or histogram that keeps a sum. Labels other than the model are dropped."""

    def __init__(self, name: str, sums: Sums[str], gauges: dict[str, Callable[[], float]]) -> None:
        self._name = name
        self._sums = sums
        self._gauges = gauges

    @property
    def family(self) -> _Series:
        return self

    current = family

    def labels(self, *_: object) -> _Series:
        return self

    def inc(self, amount: float = 1.0) -> None:
        self._sums[self._name] += amount  # type: ignore[assignment]  # Counter is declared for integers

    observe = inc

    def set(self, value: float) -> None:
        self._sums[self._name] = value  # type: ignore[assignment]

    def set_function(self, function: Callable[[], float]) -> None:
        self._gauges[self._name] = function


class CountedMetrics(Metrics):
    """Sums by the names of the metrics."""

    def __init__(self) -> None:
        self.sums: Sums[str] = Sums()
        self.gauges: dict[str, Callable[[], float]] = {}
        """Functions that return the present value."""
        super().__init__()

    def _gauge(self, name: str, text: str, *labels: str) -> Any:  # noqa: ARG002 - the base class's signature
        return _Series(name, self.sums, self.gauges)

    def _counter(self, name: str, text: str) -> Any:  # noqa: ARG002
        return _Series(name, self.sums, self.gauges)

    def _labelled_counter(self, name: str, text: str, label: str) -> Any:  # noqa: ARG002
        return _Series(name, self.sums, self.gauges)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Any:  # noqa: ARG002
        return _Series(name, self.sums, self.gauges)
