"""The Ray actors of a target's tensor-parallel ranks, one per GPU: Ray places them, gRPC carries every token.

Rank 0 is the driver rank: it hosts `TargetService`. The others are worker ranks. All are actors of one owner, which
starts them in the further bundles of its own placement group. When the owner's process ends, Ray ends them too.

Functions that compute import torch themselves, so that the owner, which only names these classes, starts without it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.core.config.sections import Configuration
from cluster.core.errors import PilotfishError, TargetUnavailable
from cluster.core.verification import StepSample
from cluster.wire.peer_access import PeerAccess
from workers.draft.registry import create, create_for_worker_rank
from workers.serve.configuration import load_configuration
from workers.serve.logs import set_logging
from workers.serve.node import compute_without_interruption, free_port, node_address, set_threads, use_interface_of
from workers.serve.rank_placement import RankGroup, RankPlacement, StartedRank
from workers.serve.target_servicer import StepEngine
from workers.serve.worker_server import WorkerHost, host_target

if TYPE_CHECKING:
    from workers.serve.learning.learner import Learner
    from workers.verify.group import DriverRank
from collections.abc import Awaitable, Callable


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The process of a rank."""

    process_id: int
    node: str
    """The id of its node in Ray."""

    def kill(self) -> None:
        """End the process at once, whichever node it is on."""
        if self.node == ray.get_runtime_context().get_node_id():
            _kill(self.process_id)
            return
        there = NodeAffinitySchedulingStrategy(self.node, soft=False)  # a node that is lost takes its processes along
        ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(self.process_id)


def _kill(process_id: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process_id, signal.SIGKILL)


def _own_place() -> RankPlace:
    return RankPlace(os.getpid(), ray.get_runtime_context().get_node_id())


_HEALTH_SECONDS = 0.25
"""Pause between checks of the driver rank's own health, in seconds."""
_CAUSE_SECONDS = 2.0
"""Longest wait for the errors of all ranks once one has failed as it started, in seconds."""
_LEFT = "it left the group"
_STOP_SECONDS = 5.0
"""Longest time for the ranks to stop by themselves, in seconds. Then they are killed."""


class FirstRank:
    """The driver rank: loads its part of the model, then serves `TargetService` at an address of its own.

    It also drafts, if the configuration places the drafting method on the target.
    """

    def __init__(self) -> None:
        self._driver: DriverRank | None = None
        self._engine: StepEngine | None = None
        self._server: WorkerHost | None = None
        self._learner: Learner | None = None
        self._is_stopped = asyncio.Event()
        self._owner: int | None = None
        self._has_owner = asyncio.Event()
        self._profile: tuple[StepSample, ...] = ()
        self._started: StartedRank | None = None
        self._has_started = asyncio.Event()

    def place(self) -> RankPlace:
        """Where this actor runs."""
        return _own_place()

    def offer(self) -> tuple[str, int]:
        """The address of this node, and a port at which the ranks may find each other."""
        return (host := node_address()), free_port(host)

    async def prepare(self, *, is_packed: bool, is_early: bool = False, profile: tuple[StepSample, ...] = ()) -> None:
        """Load the libraries that `start` needs, with `is_packed` for packed weights alone.

        With `is_early`, other processes wait for them. `profile` is what an earlier rank of the same target measured.
        """
        self._profile = profile
        if is_early:
            compute_without_interruption()
        await asyncio.to_thread(_load_libraries, is_packed=is_packed)

    async def claim(self, owner: int) -> bool:
        """Let this rank belong to the process `owner` of this node. Returns `False` if another one has claimed it."""
        if self._owner is not None:
            return False
        self._owner = owner
        self._has_owner.set()
        return True

    async def until_claimed(self) -> tuple[int, int | None]:
        """Return once a process has claimed this rank: the process ids of this rank and of its owner."""
        await self._has_owner.wait()
        return os.getpid(), self._owner

    async def until_started(self) -> StartedRank | None:
        """What `start` returned, once it has."""
        await self._has_started.wait()
        return self._started

    async def start(self, group: RankGroup, access: PeerAccess) -> StartedRank:
        """Load the model and listen.

        Raises `ConfigurationError`, `ModelLoadError`.
        """
        configuration = load_configuration(group.values)
        set_logging(configuration.log_level, configuration.server.log_format, "target rank 0")
        engine = await asyncio.to_thread(self._load, configuration, group)
        self._server = host_target(
            group.host,
            engine,
            access,
            lease_seconds=configuration.cluster.lease_seconds,
            hang_seconds=configuration.target.step_timeout_seconds,
            learning=None if self._learner is None else self._learner.status,
        )
        await self._server.start()
        self._started = StartedRank(self._server.address, engine.info().profile, _is_packed())
        self._has_started.set()
        return self._started

    async def run(self) -> None:
        """Return after `stop()`. Raises `WorkerUnavailable` once this rank can compute no more."""
        while not self._is_stopped.is_set():
            self.check_health()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopped.wait(), _HEALTH_SECONDS)

    def check_health(self) -> None:
        """Raise `WorkerUnavailable` if the group is broken or the last computations all failed."""
        if self._driver is not None and self._driver.failure is not None:
            raise TargetUnavailable(f"the tensor-parallel group is broken: {self._driver.failure}")
        if self._server is not None:
            self._server.check_health()

    async def stop(self) -> None:
        """End the calls in flight and a training, close the engine and stop the worker ranks."""
        self._is_stopped.set()
        if self._learner is not None:
            await asyncio.to_thread(self._learner.close)
        if self._server is not None:
            await self._server.stop()
        elif self._engine is not None:  # it may be loaded without being hosted
            await asyncio.to_thread(self._engine.close)

    def _load(self, configuration: Configuration, group: RankGroup) -> StepEngine:
        from workers.ranks import failing_together
        from workers.verify.build import build_engine
        from workers.verify.group import DriverRank, join_group

        target, draft = configuration.target, configuration.draft
        compute_without_interruption()
        set_threads(group.threads)
        if target.tensor_parallel > 1:
            use_interface_of(group.host)
            join_group(target, 0, group.host, group.rendezvous)
        with failing_together(target.tensor_parallel):
            method = create(draft, target) if draft.is_colocated else None
        engine = self._engine = build_engine(target, method=method, profile=group.profile or self._profile)
        with failing_together(target.tensor_parallel):
            if draft.learn == "on" and draft.is_colocated:
                from workers.serve.learning.learner import start_learner

                self._learner = start_learner(configuration, method, lambda: engine.is_idle)
        if target.tensor_parallel > 1:
            self._engine = self._driver = DriverRank(engine, target.step_timeout_seconds)
        return self._engine


class WorkerRank:
    """A rank above 0."""

    def place(self) -> RankPlace:
        """Where this actor runs."""
        return _own_place()

    def prepare(self, *, is_packed: bool) -> None:
        """Load the libraries that `run` needs, with `is_packed` for packed weights alone."""
        _load_libraries(is_packed=is_packed)

    def run(self, group: RankGroup, rank: int) -> None:
        """Join the group, load this rank's part, and run the driver rank's commands until the stop command.

        Drafting methods that compute with the target's layers run on this rank, too.

        Raises any error that ends the group.
        """
        from workers.ranks import failing_together
        from workers.verify.build import build_engine
        from workers.verify.group import join_group, leave_group_at_last, run_worker_rank

        configuration = load_configuration(group.values)
        target = configuration.target
        set_logging(configuration.log_level, configuration.server.log_format, f"target rank {rank}")
        compute_without_interruption()
        set_threads(group.threads)
        use_interface_of(node_address() if group.spans_nodes else group.host)
        join_group(target, rank, group.host, group.rendezvous)
        try:
            with failing_together(target.tensor_parallel):
                method = create_for_worker_rank(configuration.draft, target)
            engine = build_engine(target, rank, method, group.profile)
            with failing_together(target.tensor_parallel):
                pass  # the first rank may start a training
            run_worker_rank(engine, target.step_timeout_seconds)
        finally:
            leave_group_at_last()


class RankActors:
    """The ranks of one target, from `start()` until they end. It is a `workers.serve.rank_supervisor.Ranks`.

    The owner's process has bundle 0 of the placement group, rank `i` is in bundle `i + 1`. All are on one node, unless
    the placement spans nodes.
    """

    def __init__(
        self,
        configuration: Configuration,
        threads: int,
        host: str,
        placement: RankPlacement,
        access: PeerAccess,
    ) -> None:
        self._values = configuration.model_dump(
            mode="json",
            include={"target": True, "draft": True, "cluster": True, "log_level": True, "server": {"log_format"}},
        )
        self._size = configuration.target.tensor_parallel
        self._start_seconds = configuration.server.start_timeout_seconds
        self._threads = threads
        self._host = host
        self._placement = placement
        self._access = access
        self._actors: list[Any] = []  # Ray's types do not know the methods of actors
        self._places: list[RankPlace | None] = []
        self._running: dict[asyncio.Future[None], int] = {}

    async def start(self) -> str:
        """Start all ranks. Returns the address of `TargetService`. Raises the error of the rank that failed."""
        self._actors = await self._placement.take()
        first = self._actors[0]
        self._places = [None] * self._size
        host, rendezvous = self._host, free_port(self._host)
        if self._placement.spans_nodes:
            async with asyncio.timeout(self._start_seconds):
                host, rendezvous = await _future(first.offer.remote())
        profile = self._placement.step_profile
        group = RankGroup(self._values, self._threads, host, rendezvous, self._placement.spans_nodes, profile)
        identified = asyncio.gather(*(self._identify(rank) for rank in range(self._size)), return_exceptions=True)
        starting = _future(first.start.remote(group, self._access))
        for rank in range(1, self._size):
            running = self._actors[rank].run.remote(group, rank)
            self._running[_future(running)] = rank
        # A worker rank may end while the driver rank waits for it to join: raise instead of waiting for ever.
        awaited: list[asyncio.Future[Any]] = [starting, *self._running]
        done, _ = await asyncio.wait(awaited, timeout=self._start_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:  # a rank is frozen, or one waits for ever for another
            raise TargetUnavailable(f"the ranks have not started within {self._start_seconds:g} s")
        if done != {starting} or starting.exception() is not None:
            await asyncio.wait(awaited, timeout=_CAUSE_SECONDS)  # when one rank fails, the others fail with it
            raise self._failed_start(starting)
        started: StartedRank = starting.result()
        self._placement.step_profile = started.profile
        await identified
        self._running[_future(first.run.remote())] = 0
        self._placement.prepare(is_packed=started.is_packed)
        return started.address

    async def ended(self) -> str:
        """Return once any rank has ended or is frozen, with the reason. The ranks cannot compute from then on."""
        pings = {asyncio.create_task(until_lost(partial(self._identify, rank))): rank for rank in range(self._size)}
        awaited: list[asyncio.Future[Any]] = [*self._running, *pings]
        try:
            ended, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            self._raise_for_ended()
        except TargetUnavailable as error:
            return str(error)
        finally:
            for ping in pings:
                ping.cancel()
        return "; ".join(f"rank {rank}: {ping.result()}" for ping, rank in pings.items() if ping in ended)

    async def stop(self) -> None:
        """Let the ranks finish the calls in flight and release what they hold, then end their processes."""
        if self._actors:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(_future(self._actors[0].stop.remote()), _STOP_SECONDS)
                if self._running:  # none while they start
                    await asyncio.wait(self._running, timeout=_STOP_SECONDS)
        self._placement.discard()
        self.kill()

    def kill(self) -> None:
        """End the processes of all ranks at once. Killing again does nothing."""
        ended = {rank for running, rank in self._running.items() if running.done()}
        for rank, actor in enumerate(self._actors):
            ray.kill(actor)
            place = self._places[rank]
            if place is not None and rank not in ended:
                place.kill()  # Ray asks the process to end, but a stopped or hanging one does not answer
        for running in self._running:
            running.add_done_callback(_consume)
        self._actors, self._running = [], {}

    def process_ids(self) -> list[int]:
        """The process ids of ranks on this node, as far as they are known, also after their processes ended."""
        here = ray.get_runtime_context().get_node_id()
        return [place.process_id for place in self._places if place is not None and place.node == here]

    async def _identify(self, rank: int) -> None:
        self._places[rank] = await _future(self._actors[rank].place.remote())

    def _failed_start(self, starting: asyncio.Future[Any]) -> PilotfishError:
        """The error of the rank that failed by itself, and not those of ranks that failed because of it."""
        ended = ((rank, running) for running, rank in self._running.items() if running.done())
        found = {rank: _error_of(running) for rank, running in ended}
        if starting.done() and (error := _error_of(starting)) is not None:
            found = {0: error, **found}
        rank = next((one for one, error in found.items() if not _is_consequence(error)), next(iter(found)))
        error = found[rank]
        if rank == 0 and isinstance(error, PilotfishError):
            return error
        if rank == 0:
            return TargetUnavailable(f"rank 0 of {self._size} did not start: {error}")
        return TargetUnavailable(f"rank {rank} of {self._size} ended: {error or _LEFT}")

    def _raise_for_ended(self) -> None:
        for running, rank in self._running.items():
            if running.done():
                raise TargetUnavailable(f"rank {rank} of {self._size} ended: {_error_of(running) or _LEFT}")


def rank_kinds(tensor_parallel: int) -> tuple[type, ...]:
    """The classes of the ranks' actors, by rank."""
    return (FirstRank, *([WorkerRank] * (tensor_parallel - 1)))


def _is_packed() -> bool:
    return "transformers" not in sys.modules


def _load_libraries(*, is_packed: bool) -> None:
    import workers.verify.build
    import workers.verify.group

    load_configuration({})  # imports the settings of all drafting methods
    if not is_packed:
        import workers.model.loading  # noqa: F401


def _future(reference: Any) -> asyncio.Future[Any]:
    """The result of a call to an actor, as a future of the running event loop."""
    return asyncio.wrap_future(reference.future())


def _cause(error: BaseException) -> BaseException:
    """The error that the actor itself raised, if it raised one; else Ray's error, which says how the actor ended."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def _error_of(ended: asyncio.Future[Any]) -> BaseException | None:
    """What the actor itself raised; `None` if it raised nothing."""
    error = None if ended.cancelled() else ended.exception()
    return None if error is None else _cause(error)


def _is_consequence(error: BaseException | None) -> bool:
    """Whether a rank raised this, or left the group, because another rank failed."""
    from workers.ranks import AnotherRankFailed  # imports torch

    return error is None or isinstance(error, AnotherRankFailed)


def _consume(running: asyncio.Future[None]) -> None:
    """Retrieve the error of a killed rank, which is expected."""
    if not running.cancelled():
        running.exception()


PING_SECONDS = 5.0
"""Longest wait for the answer to one ping, in seconds."""
MOST_UNANSWERED = 4
"""Pings without an answer in a row after which a process counts as frozen.

Several, because the timer of a ping also expires when the process that sends it was itself stopped for a while.
"""
PERIOD_SECONDS = 1.0
"""Pause between an answer and the next ping, in seconds."""


async def until_lost(
    ping: Callable[[], Awaitable[object]], seconds: float = PING_SECONDS, period_seconds: float = PERIOD_SECONDS
) -> str:
    """Ping a process until a ping fails, or `MOST_UNANSWERED` in a row have no answer. Returns the reason.

    A slow process answers late, but one that answers at least one ping of `seconds` in time is not lost.
    """
    unanswered = 0
    while unanswered < MOST_UNANSWERED:
        try:
            async with asyncio.timeout(seconds):
                await ping()
        except TimeoutError:
            unanswered += 1
        except Exception as error:
            return str(error) or repr(error)
        else:
            unanswered = 0
            await asyncio.sleep(period_seconds)
    return f"it does not answer {MOST_UNANSWERED} pings of {seconds:g} s: it is frozen"
