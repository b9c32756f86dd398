"""How many target replicas Serve is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.core.config.server import AutoscalingSection
from deploy.ray.autoscaling import METRIC, LoadPolicy, number_of_replicas


def wanted(*sequences: float, least: int = 1, most: int = 4) -> int:
    context: Any = SimpleNamespace(
        aggregated_metrics={METRIC: dict(enumerate(sequences))} if sequences else None,
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
    )
    return LoadPolicy(sequences_per_replica=32)(context)[0]


@pytest.mark.parametrize(
    ("sequences", "replicas"), [((), 1), ((0,), 1), ((32,), 1), ((33,), 2), ((40, 40), 3), ((500, 0), 4)]
)
def test_sequences_of_all_replicas_decide_within_the_bounds(sequences: tuple[float, ...], replicas: int) -> None:
    assert wanted(*sequences) == replicas


def test_without_a_maximum_the_number_is_fixed() -> None:
    assert number_of_replicas(3, AutoscalingSection()) == {"num_replicas": 3}


def test_with_a_maximum_serve_scales_between_the_bounds() -> None:
    scaling = number_of_replicas(2, AutoscalingSection(max_replicas=5))["autoscaling_config"]
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, 2, 5)
    assert scaling.policy.policy_kwargs == {"sequences_per_replica": 32}
