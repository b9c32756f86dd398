"""Places the Ray actors of a target's ranks, and keeps standby ones: processes that have loaded their libraries only.

A rank that starts anew waits longest for its process and its libraries. A standby actor has both, so after a loss only
the weights are loaded. Standby actors of a replica end with it; a `WaitingRank` belongs to the process that deployed
the application, so it is there for a replica that takes the place of a killed one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
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
"""Longest wait for the answer of a waiting rank, in seconds."""
_MOST_WAITING = 8
"""Waiting ranks of an application, the claimed ones included."""
_SETTLE_SECONDS = 5.0
"""Time after the start of a rank in which no other one begins to wait, in seconds: requests need the cores."""
_LOOK_SECONDS = 0.2
"""Time within which a `WaitingRank` stops, in seconds."""
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

        With an `application`, its first rank may be a `WaitingRank`. `spans_nodes`: not all need be on one node.
        """
        self._application = application
        self._kinds = tuple(kinds)
        self._environment = dict(environment)
        self._wants_standby = standby
        self._standby: list[Any] = []  # Ray's types do not know the methods of actors
        self.spans_nodes = spans_nodes
        self.step_profile: tuple[StepSample, ...] = ()
        """What the first ranks measured as they warmed up. Ranks that start later do not measure it again."""

    async def claim(self) -> Any | None:
        """A waiting rank of the application, if there is one that nobody has claimed."""
        for number in range(_MOST_WAITING if self._application else 0):
            try:
                rank = await asyncio.to_thread(ray.get_actor, _waiting_name(self._application, number), _NAMESPACE)
            except ValueError:
                continue
            try:
                async with asyncio.timeout(_CLAIM_SECONDS):
                    if await asyncio.wrap_future(rank.claim.remote(os.getpid()).future()):
                        return rank
            except RayError as error:  # it has just ended
                logger.info("a waiting rank does not answer: %r", error)
            except TimeoutError:
                logger.warning("a waiting rank does not answer within %g s", _CLAIM_SECONDS)
                ray.kill(rank)
        return None

    def take(self, waiting: Any | None = None) -> list[Any]:
        """Actors of all ranks: the standby ones if there are any, else new ones. Raises `TargetUnavailable`.

        `waiting` takes the place of rank 0.
        """
        standby, self._standby = self._standby, []
        if standby:
            logger.info("the ranks start in %d standby processes", len(standby))
            return standby
        group = _placement_group()
        kept = [] if waiting is None else [waiting]
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


class WaitingRank:
    """A first rank of an application on this machine, started before it is needed.

    The next replica that starts its ranks claims it (`RankPlacement.claim`), and it ends with that replica, or with the
    process that made this object. `kind` is the class of rank 0.
    """

    def __init__(self, kind: type, application: str, environment: Mapping[str, str]) -> None:
        self._kind = kind
        self._application = application
        self._environment = dict(environment)
        self._ranks: dict[int, Any] = {}  # Ray ends an actor when the last handle of its maker is gone
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, again: bool) -> None:
        """Start it for the application that is about to be deployed. With `again`, one follows each that is claimed."""
        waiting = self._begin(is_packed=True, is_early=True)
        if again:
            self._thread = threading.Thread(target=self._follow, args=(waiting,), name="waiting-rank", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Start none any more. Ranks that were started stay as long as this object."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self, waiting: Any | None) -> None:
        is_packed = True
        while not self._stopping.is_set():
            is_packed = self._until_started(waiting, is_packed=is_packed)
            if not self._stopping.wait(_SETTLE_SECONDS):
                waiting = self._begin(is_packed=is_packed, is_early=False)

    def _until_started(self, rank: Any | None, *, is_packed: bool) -> bool:
        """Wait until a claimed rank serves or has ended. Returns whether it read packed weights, if it says so."""
        started = [] if rank is None else [rank.until_started.remote()]
        while started and not self._stopping.is_set():
            ended, started = ray.wait(started, timeout=_LOOK_SECONDS)
            for one in ended:
                with suppress(RayError):
                    is_packed = bool(ray.get(one))
        return is_packed

    def _begin(self, *, is_packed: bool, is_early: bool) -> Any | None:
        """Start one and let it load its libraries. Returns `None` if too many of them run."""
        options = {"namespace": _NAMESPACE, **_options({}, self._environment)}
        for number in range(_MOST_WAITING):
            try:
                rank = ray.remote(self._kind).options(name=_waiting_name(self._application, number), **options).remote()
            except ValueError:  # it has been claimed and runs
                continue
            rank.prepare.remote(is_packed=is_packed, is_early=is_early)
            self._ranks[number] = rank
            return rank
        return None


def _waiting_name(application: str, number: int) -> str:
    return f"first-rank-{application}-{number}"


def _placement_group() -> PlacementGroup:
    group = get_current_placement_group()
    if group is None:
        raise TargetUnavailable("a target needs a placement group: deploy it with deploy.ray.application")
    return group
