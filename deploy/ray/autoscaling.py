"""How many target replicas Ray Serve runs, by the load that the coordinators report.

Requests reach coordinators over gRPC, so Serve does not see them and asks each replica (`record_autoscaling_stats`).
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.core.config.server import AutoscalingSection

METRIC = "pilotfish_sequences"
"""Name of the metric that a replica reports: its waiting and running sequences."""


class LoadPolicy:
    """Serve's autoscaling policy: as many replicas as the reported sequences need, within the bounds."""

    def __init__(self, sequences_per_replica: int) -> None:
        self._sequences_per_replica = sequences_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas, and the state of the policy, which has none."""
        reported = (context.aggregated_metrics or {}).get(METRIC, {})
        wanted = math.ceil(sum(reported.values()) / self._sequences_per_replica)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(least, min(most, wanted)), {}


def number_of_replicas(replicas: int, section: AutoscalingSection) -> dict[str, Any]:
    """Serve's options: a fixed number of replicas, or one between `replicas` and the configured maximum."""
    if not section.max_replicas:
        return {"num_replicas": replicas}
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=LoadPolicy, policy_kwargs={"sequences_per_replica": section.sequences_per_replica}
    )
    scaling = AutoscalingConfig(
        min_replicas=replicas,
        initial_replicas=replicas,
        max_replicas=max(replicas, section.max_replicas),
        policy=policy,
    )
    return {"autoscaling_config": scaling}
