"""The HELP texts of the metrics."""

from __future__ import annotations

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.ingress.observability.ingress_metrics import IngressMetrics
from tests.support.fakes.fake_cluster import configure
from tests.support.fakes.fake_target import FakeTarget

FIRST_WORDS = (
    "Number of ",
    "Time ",
    "Total time ",
    "Predicted total time ",
    "Measured total time ",
    "Share of ",
    "1 if ",
)


def test_every_metric_says_what_it_counts_and_in_which_unit() -> None:
    families = [family for kind in (Metrics, IngressMetrics) for family in kind().registry.collect()]
    assert len(families) > 40
    for family in families:
        assert family.documentation.startswith(FIRST_WORDS), family.name
        assert family.documentation.endswith("."), family.name
        assert ("seconds" in family.name) == ("seconds" in family.documentation), family.name


def test_tokens_are_counted_when_they_are_sent_to_clients() -> None:
    metrics = Metrics()
    coordinator = Coordinator(FakeTarget(), [], configure(), metrics)
    for count in (3, 0, 4):
        coordinator.count_sent(count)
    assert metrics.registry.get_sample_value("vllm:generation_tokens_total", {"model_name": "", "engine": "0"}) == 7
