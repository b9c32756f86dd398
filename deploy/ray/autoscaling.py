"""How many target replicas Ray Serve runs, by the load that the coordinators report.

Requests reach coordinators over gRPC, so Serve does not see them and asks each replica (`record_autoscaling_stats`).
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.core.config.server import AutoscalingSection
from cluster.core.membership import Load

SEQUENCES = "pilotfish_sequences"
"""Name of a metric that a replica reports: its waiting and running sequences."""
KV_USAGE = "pilotfish_kv_usage"
"""Name of a metric that a replica reports: the used share of its KV blocks, 0 to 1."""


def reported(load: Load) -> dict[str, float]:
    """The metrics of a replica."""
    return {SEQUENCES: float(load.waiting + load.running), KV_USAGE: load.kv_usage}


class LoadPolicy:
    """Serve's autoscaling policy: as many replicas as the sequences and their KV blocks need, within the bounds."""

    def __init__(self, sequences_per_replica: int, kv_usage: float) -> None:
        self._sequences_per_replica = sequences_per_replica
        self._kv_usage = kv_usage

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas, and the state of the policy, which has none."""
        metrics = context.aggregated_metrics or {}
        sequences, used = (sum(metrics.get(name, {}).values()) for name in (SEQUENCES, KV_USAGE))
        wanted = max(math.ceil(sequences / self._sequences_per_replica), math.ceil(used / self._kv_usage))
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(least, min(most, wanted)), {}


def number_of_replicas(replicas: int, section: AutoscalingSection) -> dict[str, Any]:
    """Serve's options: a fixed number of replicas, or one between `replicas` and the configured maximum."""
    if not section.max_replicas:
        return {"num_replicas": replicas}
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=LoadPolicy, policy_kwargs=section.model_dump(exclude={"max_replicas"})
    )
    scaling = AutoscalingConfig(
        min_replicas=replicas,
        initial_replicas=replicas,
        max_replicas=section.max_replicas,
        policy=policy,
    )
    return {"autoscaling_config": scaling}
