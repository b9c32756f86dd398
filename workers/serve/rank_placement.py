"""Places the Ray actors of a target's ranks, and keeps standby ones: processes that have loaded their libraries only.

A rank that starts anew waits longest for its process and its libraries. A standby actor has both, so after a loss only
the weights are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.core.errors import TargetUnavailable
from cluster.core.verification import StepSample

logger = logging.getLogger(__name__)

_MOST_CALLS = 4
"""Calls that one rank answers at the same time."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """What all ranks of a target are started with."""

    values: Mapping[str, Any]
    """The settings of the cluster, by section."""
    threads: int
    """Intra-op threads of each rank."""
    host: str
    """Address at which rank 0 listens."""
    rendezvous: int
    """Port of the store in which the ranks find each other."""
    profile: tuple[StepSample, ...] = ()
    """What ranks before these measured as they warmed up; empty at the first start."""


class RankPlacement:
    """The actors of all ranks: rank `i` in bundle `i + 1` of the current placement group, all on one node.

    A standby actor claims no resources, because its bundle belongs to the ranks of this target alone. Ray gives an
    actor its GPU when it starts, so there are none where ranks use GPUs.
    """

    def __init__(self, kinds: Sequence[type], environment: Mapping[str, str], *, standby: bool) -> None:
        """`kinds` are the classes of the actors, by rank. Each has a method `prepare`, which loads its libraries."""
        self._kinds = tuple(kinds)
        self._environment = dict(environment)
        self._wants_standby = standby
        self._standby: list[Any] = []  # Ray's types do not know the methods of actors
        self.step_profile: tuple[StepSample, ...] = ()
        """What the first ranks measured as they warmed up. Ranks that start later do not measure it again."""

    def take(self) -> list[Any]:
        """Actors of all ranks: the standby ones if there are any, else new ones. Raises `TargetUnavailable`."""
        standby, self._standby = self._standby, []
        if standby:
            logger.info("the ranks start in %d standby processes", len(standby))
            return standby
        group = _placement_group()
        return [self._place(group, rank, group.bundle_specs[rank + 1]) for rank in range(len(self._kinds))]

    def prepare(self) -> None:
        """Start standby actors in the background, if they are wanted and missing."""
        if not self._wants_standby or self._standby:
            return
        group = _placement_group()
        if any(bundle.get("GPU") for bundle in group.bundle_specs):
            return
        self._standby = [self._place(group, rank, {}) for rank in range(len(self._kinds))]
        for actor in self._standby:
            actor.prepare.remote()

    def discard(self) -> None:
        """End the standby processes. Discarding again does nothing."""
        standby, self._standby = self._standby, []
        for actor in standby:
            with suppress(RayError):
                ray.kill(actor)

    def _place(self, group: PlacementGroup, rank: int, claims: Mapping[str, float]) -> Any:
        return (
            ray.remote(self._kinds[rank])
            .options(
                num_cpus=claims.get("CPU", 0),
                num_gpus=claims.get("GPU", 0),
                max_concurrency=_MOST_CALLS,  # a rank answers pings while it runs
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank + 1),
                runtime_env={"env_vars": self._environment} if self._environment else None,
            )
            .remote()
        )


def _placement_group() -> PlacementGroup:
    group = get_current_placement_group()
    if group is None:
        raise TargetUnavailable("a target needs a placement group: deploy it with deploy.ray.application")
    return group
