"""What waits until the next step has been sent, above all the delivery of what a round brought to its readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, ParamSpec

from cluster.core.errors import PilotfishError
from cluster.core.request import Commit

Item = Commit | PilotfishError
Arguments = ParamSpec("Arguments")

HELD_SECONDS = 0.1
"""Longest time for which items wait for later ones of a patient reader, in seconds."""


def call_during_step(
    function: Callable[Arguments, None], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> None:
    """Call a function two iterations of the event loop later, when the loop has sent its next step.

    The work is then done while the target computes, instead of delaying the step.
    """
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, partial(function, *arguments, **keywords))


class EmittedTokens(NamedTuple):
    """Tokens of one commit, and when they were handed to the reader."""

    tokens: int
    """Number of tokens."""
    since_arrival: float | None
    """Seconds since the request arrived; set for its first tokens."""
    since_latest: float | None
    """Seconds since the answer's previous tokens; set for all but its first ones."""


class Inbox:
    """The items for one reader, in order."""

    __slots__ = ("_arrival", "_has_begun", "_is_patient", "_items")

    def __init__(self, *, is_patient: bool = False) -> None:
        """A patient reader is woken by its first item, and by one that ends an answer. Others wait for `wake`."""
        self._items: deque[Item] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._is_patient = is_patient
        self._has_begun = False

    def put(self, item: Item) -> bool:
        """Add an item. Returns whether the reader was woken if it waited; otherwise `wake` must be called soon."""
        self._items.append(item)
        is_held = self._is_patient and self._has_begun and isinstance(item, Commit) and item.finish is None
        self._has_begun = True
        if not is_held:
            self.wake()
        return not is_held

    def wake(self) -> None:
        """Wake the reader if it waits."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def get(self) -> Item:
        """Wait for an item and take it. Only one reader may wait."""
        while not self._items:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._items.popleft()


class Delivery:
    """Puts items into inboxes when the next step has been sent, so that readers work while the target computes.

    One callback serves all items of a round. Patient readers are woken together, `HELD_SECONDS` after the first item
    that did not wake its reader: every wake-up passes several processes, which share cores with the target.
    """

    def __init__(self) -> None:
        self._given: list[tuple[Inbox, Item]] = []
        self._held: dict[Inbox, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def give(self, inbox: Inbox, item: Item) -> None:
        """Put an item into an inbox soon, after those that were given before."""
        if not self._given:
            call_during_step(self._deliver)
        self._given.append((inbox, item))

    def _deliver(self) -> None:
        given, self._given = self._given, []
        for inbox, item in given:
            if inbox.put(item):
                self._held.pop(inbox, None)
            else:
                self._held[inbox] = None
        if self._held and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HELD_SECONDS, self._wake_held)

    def _wake_held(self) -> None:
        held, self._held, self._timer = self._held, {}, None
        for inbox in held:
            inbox.wake()
