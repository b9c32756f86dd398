"""Families of Prometheus metrics whose series have the labels of vLLM: model and number of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

LABELS = ("model_name", "engine")
"""The labels of every series. A coordinator is one engine; a router tells coordinators apart by another label."""
ENGINE = "0"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
LONG_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


Family = TypeVar("Family", Counter, Histogram)


class Series(Generic[Family]):
    """The one series of a counter or histogram without further labels.

    Prometheus finds a series by its labels, under a lock, which takes longer than to count. So it is looked up once.
    """

    def __init__(self, family: Family) -> None:
        self.family: Family = family
        """The metric, with the series of all models."""
        self._labels = ("", ENGINE)
        self._current: Family | None = None

    def start(self, labels: tuple[str, str]) -> None:
        """Count in the series with these values of `LABELS` from now on. It starts at zero."""
        self._labels, self._current = labels, self.family.labels(*labels)

    @property
    def current(self) -> Family:
        """The series of the model that is served."""
        if self._current is None:
            self._current = self.family.labels(*self._labels)
        return self._current


class MetricFamilies:
    """A registry of its own, and methods that declare metrics in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._series = ("", ENGINE)
        """The values of `LABELS`."""
        self._plain: list[Series[Counter] | Series[Histogram]] = []
        """The series of the metrics without further labels."""

    def _start(self, model_name: str) -> None:
        """Label all series with the model's name, and start those without further labels at zero."""
        self._series = (model_name, ENGINE)
        for series in self._plain:
            series.start(self._series)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, (*LABELS, *labels), registry=self.registry)

    def _counter(self, name: str, text: str) -> Series[Counter]:
        series = Series(Counter(name, text, LABELS, registry=self.registry))
        self._plain.append(series)
        return series

    def _labelled_counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (*LABELS, label), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Series[Histogram]:
        series = Series(Histogram(name, text, LABELS, registry=self.registry, buckets=buckets))
        self._plain.append(series)
        return series

    def _second_name(self, name: str, metric: Collector) -> None:
        """Expose a metric under a second name too."""
        self.registry.register(_SecondName(name, metric))


class _SecondName(Collector):
    """The samples of a metric under another name."""

    def __init__(self, name: str, metric: Collector) -> None:
        self._name = name
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        """Yield the metric, renamed."""
        for family in self._metric.collect():
            renamed = Metric(self._name, family.documentation, family.type)
            renamed.samples = [
                Sample(self._name + one.name.removeprefix(family.name), one.labels, one.value, one.timestamp)
                for one in family.samples
            ]
            yield renamed
