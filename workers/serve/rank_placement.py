"""Places the Ray actors of a target's ranks, and keeps standby ones: processes that have loaded their libraries only.

A rank that starts anew waits longest for its process and its libraries. A standby actor has both, so after a loss only
the weights are loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
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

_NAMESPACE = "pilotfish"
"""Ray's namespace of named ranks."""
_CLAIM_SECONDS = 20.0
"""Longest wait for the answer of a rank that was started early, in seconds."""
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
    spans_nodes: bool = False
    """Whether ranks may be on other nodes than `host`."""
    profile: tuple[StepSample, ...] = ()
    """What ranks before these measured as they warmed up; empty at the first start."""


@dataclass(frozen=True, slots=True)
class StartedRank:
    """What rank 0 says once it serves."""

    address: str
    """Where `TargetService` listens."""
    profile: tuple[StepSample, ...]
    """How long steps take."""
    is_packed: bool
    """Whether it read packed weights, so that a process that takes its place needs no `transformers` either."""


class RankPlacement:
    """The actors of all ranks: rank `i` in bundle `i + 1` of the current placement group.

    A standby actor claims no resources, because its bundle belongs to the ranks of this target alone. Ray gives an
    actor its GPU when it starts, so there are none where ranks use GPUs.
    """

    def __init__(
        self,
        kinds: Sequence[type],
        environment: Mapping[str, str],
        *,
        standby: bool,
        application: str = "",
        spans_nodes: bool = False,
    ) -> None:
        """`kinds` are the classes of the actors, by rank. Each has a method `prepare`, which loads its libraries.

        With an `application`, its first rank may have been started early. `spans_nodes`: not all need be on one node.
        """
        self._application = application
        self._kinds = tuple(kinds)
        self._environment = dict(environment)
        self._wants_standby = standby
        self._standby: list[Any] = []  # Ray's types do not know the methods of actors
        self.spans_nodes = spans_nodes
        self.step_profile: tuple[StepSample, ...] = ()
        """What the first ranks measured as they warmed up. Ranks that start later do not measure it again."""

    async def claim_early(self) -> Any | None:
        """The first rank that was started before the application, if there is one and nobody has claimed it."""
        application, self._application = self._application, ""
        if not application:
            return None
        try:
            rank = await asyncio.to_thread(ray.get_actor, _early_name(application), _NAMESPACE)
        except ValueError:
            return None
        try:
            async with asyncio.timeout(_CLAIM_SECONDS):
                return rank if await asyncio.wrap_future(rank.claim.remote(os.getpid()).future()) else None
        except (RayError, TimeoutError) as error:
            logger.warning("the rank that was started early does not answer: %r", error)
            ray.kill(rank)
            return None

    def take(self, early: Any | None = None) -> list[Any]:
        """Actors of all ranks: the standby ones if there are any, else new ones. Raises `TargetUnavailable`.

        `early` takes the place of rank 0.
        """
        standby, self._standby = self._standby, []
        if standby:
            logger.info("the ranks start in %d standby processes", len(standby))
            return standby
        group = _placement_group()
        kept = [] if early is None else [early]
        return kept + [
            self._place(group, rank, group.bundle_specs[rank + 1]) for rank in range(len(kept), len(self._kinds))
        ]

    def prepare(self, *, is_packed: bool) -> None:
        """Start standby actors in the background, if they are wanted and missing.

        `is_packed`: they will read packed weights, and load the libraries for these alone.
        """
        if not self._wants_standby or self._standby:
            return
        group = _placement_group()
        if any(bundle.get("GPU") for bundle in group.bundle_specs):
            return
        self._standby = [self._place(group, rank, {}) for rank in range(len(self._kinds))]
        for actor in self._standby:
            actor.prepare.remote(is_packed=is_packed)

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
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank + 1),
                **_options(claims, self._environment),
            )
            .remote()
        )


def _options(claims: Mapping[str, float], environment: Mapping[str, str]) -> dict[str, Any]:
    """Ray's options for a rank with these claims and environment variables."""
    return {
        "num_cpus": claims.get("CPU", 0),
        "num_gpus": claims.get("GPU", 0),
        "max_concurrency": _MOST_CALLS,  # a rank answers pings while it runs
        "runtime_env": {"env_vars": dict(environment)} if environment else None,
    }


def start_early(kind: type, application: str, environment: Mapping[str, str]) -> Any:
    """Start the first rank of an application that will be deployed on this machine, and let it load its libraries.

    The first replica that starts claims it (`RankPlacement.claim_early`). Keep the returned handle as long as the
    application runs: the rank ends with it. `kind` is the class of rank 0.

    Returns `None` if an earlier one has not ended yet.
    """
    options = {"name": _early_name(application), "namespace": _NAMESPACE, **_options({}, environment)}
    try:
        rank: Any = ray.remote(kind).options(**options).remote()
    except ValueError:  # the rank of an application with this name, which was stopped, has not ended yet
        return None
    rank.prepare.remote(is_packed=True, is_early=True)
    return rank


def _early_name(application: str) -> str:
    return f"first-rank-{application}"


def _placement_group() -> PlacementGroup:
    group = get_current_placement_group()
    if group is None:
        raise TargetUnavailable("a target needs a placement group: deploy it with deploy.ray.application")
    return group
