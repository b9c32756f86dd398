"""The HELP texts of the metrics."""

from __future__ import annotations

from cluster.coordinator.metrics import Metrics

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
    families = list(Metrics().registry.collect())
    assert len(families) > 30
    for family in families:
        assert family.documentation.startswith(FIRST_WORDS), family.name
        assert family.documentation.endswith("."), family.name
        assert ("seconds" in family.name) == ("seconds" in family.documentation), family.name
