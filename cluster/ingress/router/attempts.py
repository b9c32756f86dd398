"""The attempts to send one request: which coordinators failed, and how long to wait before they are asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from cluster.core.errors import DeadlineExceeded, NotReady, Overloaded, PilotfishError

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0


class Arrivals:
    """Ends the pauses of all requests when a coordinator joins the cluster."""

    def __init__(self) -> None:
        self._known: frozenset[str] = frozenset()
        self._arrival = asyncio.Event()
        self.waiting = 0
        """Number of requests that pause."""

    def note(self, coordinators: frozenset[str]) -> None:
        """Take the ids of all coordinators."""
        if coordinators - self._known:
            self._arrival.set()
            self._arrival = asyncio.Event()
        self._known = coordinators

    async def wait(self, seconds: float) -> bool:
        """Wait for `seconds`, or until a coordinator joins. Returns whether one did."""
        self.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                return await self._arrival.wait()
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1


class Attempts:
    """The attempts since the last response. Pauses between them double up to a bound."""

    def __init__(self, patience_seconds: float, arrivals: Arrivals) -> None:
        self._patience_seconds = patience_seconds
        self._arrivals = arrivals
        self._failures: dict[str, PilotfishError] = {}
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._paused_seconds = 0.0
        self.latest: PilotfishError = NotReady("no coordinator is ready")
        """The reason of the last failed attempt."""
        self.may_move = True
        """Whether the request may leave a stalled coordinator. It does so once: a slow cluster is no loss."""

    @property
    def failed(self) -> Collection[str]:
        """The ids of the coordinators that failed since the last pause or response."""
        return self._failures.keys()

    def fail(self, coordinator: str, error: PilotfishError, *, has_moved: bool = False) -> None:
        """Record that an attempt at a coordinator failed, or that the request left it because it is stalled."""
        self.may_move = self.may_move and not has_moved
        self._failures[coordinator] = self.latest = error

    def succeed(self) -> None:
        """Record a response."""
        self._failures.clear()
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._paused_seconds = 0.0

    async def pause(self, seconds_left: float, *, has_started: bool) -> None:
        """Wait until all coordinators may be asked again, or until another one joins.

        Raises `DeadlineExceeded`. A request that has not started does not wait for a full queue, nor longer than the
        patience: then the reason is raised.
        """
        if seconds_left <= 0:
            reason = self.latest.public_message  # clients read this error, and not what the latest one may name
            raise DeadlineExceeded(f"the deadline passed while no coordinator was ready: {reason}")
        if not has_started:
            for error in self._failures.values():
                if isinstance(error, Overloaded):
                    raise error
            if self._paused_seconds >= self._patience_seconds:
                raise self.latest
        begun = asyncio.get_running_loop().time()
        has_joined = await self._arrivals.wait(min(self._pause_seconds, seconds_left))
        self._paused_seconds += asyncio.get_running_loop().time() - begun
        if not has_joined:  # else the new one is asked, and not again those that failed
            self._failures.clear()
            self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
