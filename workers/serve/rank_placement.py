"""Places the Ray actors of a target's ranks, and keeps standby ones: processes that have loaded their libraries only.

A rank that starts anew waits longest for its process and its libraries. A standby actor has both, so after a loss only
the weights are loaded. Standby actors of a replica end with it; a `WaitingRank` belongs to the process that deployed
the application, so it is there for a replica that takes the place of a killed one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import TargetUnavailable
from cluster.core.verification import StepSample

logger = logging.getLogger(__name__)

_NAMESPACE = "pilotfish"
"""Ray's namespace of named ranks."""
_CLAIM_SECONDS = 20.0
"""Longest wait for the answer of a waiting rank, in seconds."""
_SETTLE_SECONDS = 5.0
"""Time after the start of a rank in which no other one begins to wait, in seconds: requests need the cores."""
_LOOK_SECONDS = 0.2
"""Pause between two looks at the processes that claimed ranks, in seconds."""
_STOP_SECONDS = 5.0
_numbers = itertools.count()
"""Numbers in the names of waiting ranks. No other one of this process has the same."""
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
    """The actors of all ranks: rank `i` in bundle `i + 1` of a placement group.

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
        group: PlacementGroup | None = None,
    ) -> None:
        """`kinds` are the classes of the actors, by rank. Each has a method `prepare`, which loads its libraries.

        With an `application`, its first rank may be a `WaitingRank`. `spans_nodes`: not all need be on one node.
        `group`: unset, that of the process which places them.
        """
        self._group = group
        self._application = application
        self._kinds = tuple(kinds)
        self._environment = dict(environment)
        self._wants_standby = standby
        self._standby: list[Any] = []  # Ray's types do not know the methods of actors
        self.spans_nodes = spans_nodes
        self.step_profile: tuple[StepSample, ...] = ()
        """What the first ranks measured as they warmed up. Ranks that start later do not measure it again."""

    async def take(self) -> list[Any]:
        """Actors of all ranks: the standby ones if there are any, else new ones. Raises `TargetUnavailable`."""
        standby, self._standby = self._standby, []
        if standby:
            logger.info("the ranks start in %d standby processes", len(standby))
            return standby
        group = self._group or _placement_group()
        waiting = await self.claim()
        kept = [] if waiting is None else [waiting]
        return kept + [
            self._place(group, rank, group.bundle_specs[rank + 1]) for rank in range(len(kept), len(self._kinds))
        ]

    async def claim(self) -> Any | None:
        """The rank that waits for a replica of the application, unless there is none or another one has claimed it."""
        if not self._application:
            return None
        rank = await asyncio.to_thread(_newest, self._application)
        if rank is None:
            return None
        claimed = asyncio.wrap_future(rank.claim.remote(os.getpid()).future())
        if not (await asyncio.wait({claimed}, timeout=_CLAIM_SECONDS))[0]:
            logger.warning("the waiting rank does not answer within %g s", _CLAIM_SECONDS)
            claimed.add_done_callback(lambda late: _kill_unused(rank, late))
            return None
        try:
            return rank if claimed.result() else None
        except RayError as error:
            logger.warning("the waiting rank has ended: %r", error)
            return None

    def prepare(self, *, is_packed: bool) -> None:
        """Start standby actors in the background, if they are wanted and missing.

        `is_packed`: they will read packed weights, and load the libraries for these alone.
        """
        if not self._wants_standby or self._standby:
            return
        group = self._group or _placement_group()
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
    """Keeps a first rank of an application on this machine waiting, its libraries loaded, for any replica.

    The next replica that starts its ranks claims it (`RankPlacement.claim`). A claimed rank is killed when the process
    that claimed it has ended. `kind` is the class of rank 0.
    """

    def __init__(self, kind: type, application: str, environment: Mapping[str, str]) -> None:
        self._kind = kind
        self._application = application
        self._environment = dict(environment)
        self._ranks: list[Any] = []  # Ray ends an actor when the last handle of its maker is gone
        self._claimed: list[tuple[psutil.Process, psutil.Process]] = []  # ranks, each with its owner
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, again: bool) -> None:
        """Start one for the application that is about to be deployed; with `again`, one after each that is claimed."""
        waiting = self._begin(None, is_early=True)
        self._thread = threading.Thread(target=self._watch, args=(waiting, again), name="waiting-rank", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Start none any more."""
        self._stopping.set()

    def stop(self) -> None:
        """Start none any more, and end all that are left. The application must have ended."""
        self.cancel()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
        for rank in self._ranks:
            with suppress(RayError):
                ray.kill(rank)
        self._ranks = []

    def _watch(self, waiting: Any, again: bool) -> None:
        last: StartedRank | None = None
        while not self._stopping.is_set():
            try:
                last = self._until_started(waiting) or last
                self._pause(_SETTLE_SECONDS if again else None)
                if not self._stopping.is_set():
                    waiting = self._begin(last, is_early=False)
            except Exception:
                logger.exception("no rank waits for a replica")
                self._stopping.wait(_SETTLE_SECONDS)

    def _until_started(self, rank: Any) -> StartedRank | None:
        """Wait until the rank was claimed and serves, or has ended. Returns what it says, if it serves."""
        says: StartedRank | None = None
        claimed, started = rank.until_claimed.remote(), rank.until_started.remote()
        awaited = [claimed, started]
        while awaited and not self._stopping.is_set():
            ended, awaited = ray.wait(awaited, timeout=_LOOK_SECONDS)
            with suppress(RayError, psutil.NoSuchProcess):
                if claimed in ended:
                    process, owner = ray.get(claimed)
                    self._claimed.append((psutil.Process(process), psutil.Process(owner)))
                if started in ended:
                    says = ray.get(started)
            self._end_orphans()
        return says

    def _pause(self, seconds: float | None) -> None:
        """Wait for `seconds`, or without an end, until this stops."""
        end = None if seconds is None else time.monotonic() + seconds
        while (end is None or time.monotonic() < end) and not self._stopping.wait(_LOOK_SECONDS):
            self._end_orphans()

    def _end_orphans(self) -> None:
        for rank, owner in self._claimed:
            if not _runs(owner):
                with suppress(psutil.NoSuchProcess):
                    rank.kill()
        self._claimed = [(rank, owner) for rank, owner in self._claimed if _runs(rank)]

    def _begin(self, last: StartedRank | None, *, is_early: bool) -> Any:
        """Start one and let it load its libraries. `last` served before it: it measures no times of steps again."""
        name = f"{_prefix(self._application)}{next(_numbers)}"
        options = {"name": name, "namespace": _NAMESPACE, **_options({}, self._environment)}
        rank: Any = ray.remote(self._kind).options(**options).remote()
        profile = () if last is None else last.profile
        rank.prepare.remote(is_packed=last is None or last.is_packed, is_early=is_early, profile=profile)
        self._ranks.append(rank)
        return rank


def waits_again(target: TargetSection, device: str) -> bool:
    """Whether another rank waits for all replicas once one is claimed, where `serve` started Ray."""
    return target.standby is not False and target.tensor_parallel == 1 and device == "cpu"


def has_spare_ranks(target: TargetSection, *, is_local: bool) -> bool:
    """Whether each rank of a replica has a standby process of its own. `is_local`: `serve` started Ray."""
    return target.standby is True and not (is_local and waits_again(target, target.device))


def _prefix(application: str) -> str:
    return f"first-rank-{application}-"


def _newest(application: str) -> Any | None:
    """The rank of an application that began to wait last. Blocks."""
    prefix = _prefix(application)
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == _NAMESPACE]
    numbers = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    try:
        return ray.get_actor(f"{prefix}{max(int(one) for one in numbers if one.isdigit())}", _NAMESPACE)
    except ValueError:  # there is none
        return None


def _kill_unused(rank: Any, claimed: asyncio.Future[bool]) -> None:
    """End a rank whose late answer says that it was claimed for a start that did not wait for it."""
    if not claimed.cancelled() and claimed.exception() is None and claimed.result():
        ray.kill(rank)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _placement_group() -> PlacementGroup:
    group = get_current_placement_group()
    if group is None:
        raise TargetUnavailable("a target needs a placement group: deploy it with deploy.ray.application")
    return group
