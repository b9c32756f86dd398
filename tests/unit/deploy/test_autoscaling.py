"""How many target replicas Serve is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.core.config.server import AutoscalingSection
from cluster.core.membership import Load
from deploy.ray.autoscaling import LoadPolicy, number_of_replicas, reported


def wanted(*loads: Load, least: int = 1, most: int = 4) -> int:
    found = [reported(load) for load in loads]
    metrics = {name: {replica: one[name] for replica, one in enumerate(found)} for name in (found[0] if found else ())}
    context: Any = SimpleNamespace(
        aggregated_metrics=metrics or None, capacity_adjusted_min_replicas=least, capacity_adjusted_max_replicas=most
    )
    return LoadPolicy(sequences_per_replica=32, kv_usage=0.8)(context)[0]


@pytest.mark.parametrize(
    ("sequences", "replicas"), [((), 1), ((0,), 1), ((32,), 1), ((33,), 2), ((40, 40), 3), ((500, 0), 4)]
)
def test_sequences_of_all_replicas_decide_within_the_bounds(sequences: tuple[float, ...], replicas: int) -> None:
    assert wanted(*(Load(waiting=int(count) // 2, running=int(count + 1) // 2) for count in sequences)) == replicas


@pytest.mark.parametrize(
    ("usages", "replicas"), [((0.8,), 1), ((0.9,), 2), ((0.9, 0.5), 2), ((1.0, 1.0), 3), ((1.0,) * 4, 4)]
)
def test_few_sequences_that_use_many_kv_blocks_need_further_replicas(usages: tuple[float, ...], replicas: int) -> None:
    assert wanted(*(Load(running=1, kv_usage=usage) for usage in usages)) == replicas


def test_without_a_maximum_the_number_is_fixed() -> None:
    assert number_of_replicas(3, AutoscalingSection()) == {"num_replicas": 3}


def test_with_a_maximum_serve_scales_between_the_bounds() -> None:
    scaling = number_of_replicas(2, AutoscalingSection(max_replicas=5))["autoscaling_config"]
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, 2, 5)
    assert scaling.policy.policy_kwargs == {"sequences_per_replica": 32, "kv_usage": 0.8}
