"""The directory: a Ray actor that keeps the members of one application, and the client that every member has.

The actor holds soft state only. Whoever needs it makes it (`get_if_exists`); it ends with its maker, and Ray restarts
it after a crash. Its users keep the last view while it is away, and register again with their next heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from cluster.core.errors import WorkerUnavailable
from cluster.core.membership import BEAT_SECONDS, Member, MemberRole, Membership, View, merged

if TYPE_CHECKING:
    from ray.serve.context import ReplicaContext

logger = logging.getLogger(__name__)

NAMESPACE = "pilotfish"
_CALL_SECONDS = 5.0
"""Timeout of a call to the directory, in seconds."""
_MOST_TIMEOUTS = 4
"""Calls in a row without an answer after which a directory counts as frozen."""
_FAST_BEAT_SECONDS = 0.2
"""Time between two calls while something is missing, requests wait or the member drains, in seconds."""
_DRAIN_POLL_SECONDS = 0.1
_LATE_SECONDS = 5.0
"""How much longer than the drain itself its caller waits, in seconds."""


class Directory:
    """The actor. Its methods never block."""

    def __init__(self) -> None:
        self._membership = Membership(time.monotonic())
        self._drain_seconds: float | None = None

    def exchange(self, member: Member | None) -> tuple[View, float | None]:
        """Register `member`, if one is given. Returns all members, and within how many seconds all are to drain."""
        now = time.monotonic()
        if member is not None:
            self._membership.beat(member, now)
        return self._membership.view(now), self._drain_seconds

    def leave(self, member_id: str) -> None:
        """Remove a member that ends."""
        self._membership.leave(member_id)

    def drain(self, seconds: float) -> None:
        """Tell all members to take no more requests, and to end those that are left after `seconds`."""
        self._drain_seconds = seconds


class DirectoryClient:
    """Sends heartbeats and keeps the last view, from `start()` to `stop()`.

    `describe` returns the member to register, or `None` as long as this process does not serve others. `on_view` is
    called with every view, `on_drain` with the seconds that are left for requests. Heartbeats follow each other quickly
    while `is_complete` is false for the view, and while the member drains.
    """

    def __init__(
        self,
        application: str,
        describe: Callable[[], Member | None] = lambda: None,
        on_view: Callable[[View], None] = lambda _: None,
        on_drain: Callable[[float], None] = lambda _: None,
        is_complete: Callable[[View], bool] = lambda _: True,
    ) -> None:
        self._application = application
        self._describe = describe
        self._on_view = on_view
        self._on_drain = on_drain
        self._is_complete = is_complete
        self._directory: Any = None  # Ray's types do not know the methods of actors
        self._drain_seconds: float | None = None
        self._timeouts = 0
        self._registered: str | None = None
        self._beating: asyncio.Task[None] | None = None
        self.view = View()
        """The last view."""

    def start(self) -> None:
        """Begin to send heartbeats."""
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat_for_ever(), name="directory")

    def check_health(self) -> None:
        """Raise `WorkerUnavailable` if no heartbeats are sent any more."""
        if self._beating is not None and self._beating.done():
            raise WorkerUnavailable("no heartbeats are sent to the directory any more")

    async def beat(self) -> None:
        """Exchange one heartbeat for a view now. While the directory is away, the last view stays."""
        member = self._describe()
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                if self._directory is None:
                    self._directory = await asyncio.to_thread(_find_or_make, self._application)
                view, drain_seconds = await _result(self._directory.exchange.remote(member))
        except (RayError, TimeoutError, ValueError) as error:
            reason = type(error).__name__
            logger.warning("the directory does not answer (%s); the replicas that it named last are used", reason)
            self._give_up(error)
            return
        self._timeouts = 0
        self._registered = None if member is None else member.id
        self.view = merged(self.view, view)
        self._on_view(self.view)
        if drain_seconds is not None and drain_seconds != self._drain_seconds:
            self._drain_seconds = drain_seconds
            self._on_drain(drain_seconds)

    async def stop(self) -> None:
        """Send no more heartbeats, and leave. Stopping again does nothing."""
        beating, self._beating = self._beating, None
        if beating is None:
            return
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        if self._directory is not None and self._registered is not None:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(_result(self._directory.leave.remote(self._registered)), _CALL_SECONDS)

    def _give_up(self, error: Exception) -> None:
        """Look for another directory the next time. One that is frozen must restart first."""
        self._timeouts = self._timeouts + 1 if isinstance(error, TimeoutError) else _MOST_TIMEOUTS
        if self._timeouts >= _MOST_TIMEOUTS:
            self._timeouts = 0
            if self._directory is not None and isinstance(error, TimeoutError):
                ray.kill(self._directory, no_restart=False)
            self._directory = None

    async def _beat_for_ever(self) -> None:
        while True:
            try:
                await self.beat()
            except Exception:
                logger.exception("a heartbeat failed")
            # A member that drains hears soon that it is to drain at once.
            is_settled = self._is_complete(self.view) and self._drain_seconds is None
            await asyncio.sleep(BEAT_SECONDS if is_settled else _FAST_BEAT_SECONDS)


def member_id(context: ReplicaContext) -> str:
    """The id of a Serve replica as a member, which no other one ever has."""
    return f"{context.deployment.lower()}-{context.replica_id.unique_id}"


def drain(application: str, seconds: float) -> None:
    """Let all coordinators of an application drain, and return when none has a request any more. Blocks.

    Does nothing for an application without a directory. Raises `TimeoutError` if some still have requests after
    `seconds` and a little more, and `RayError`.
    """
    try:
        directory: Any = ray.get_actor(_name(application), NAMESPACE)
    except ValueError:
        return
    ray.get(directory.drain.remote(seconds), timeout=_CALL_SECONDS)
    until = time.monotonic() + seconds + _LATE_SECONDS
    while time.monotonic() < until:
        answer: tuple[View, float | None] = ray.get(directory.exchange.remote(None), timeout=_CALL_SECONDS)
        targets = answer[0].of(MemberRole.TARGET)
        if all(one.is_draining and not (one.load.waiting or one.load.running) for one in targets):
            return
        time.sleep(_DRAIN_POLL_SECONDS)
    raise TimeoutError(f"some requests run on {seconds + _LATE_SECONDS:g} s after the drain began")


def _name(application: str) -> str:
    return f"directory-{application}"


def _find_or_make(application: str) -> Any:
    """The handle of the application's directory. Makes it if nobody has. Blocks for as long as Ray takes."""
    actor = ray.remote(Directory).options(
        name=_name(application),
        namespace=NAMESPACE,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy="DEFAULT",
    )
    return actor.remote()


def _result(reference: Any) -> asyncio.Future[Any]:
    """The result of a call to an actor, as a future of the running event loop."""
    return asyncio.wrap_future(reference.future())
