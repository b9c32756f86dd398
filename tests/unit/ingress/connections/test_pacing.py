"""A flood of requests is let in one after another; what has no body never waits."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from starlette.types import Receive, Scope, Send

from cluster.ingress.connections.pacing import LONGEST_TURN_SECONDS, PacingMiddleware


class Flood:
    """Counts the requests that the application runs, on a clock that the test sets."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.seconds_per_turn = 0.0
        self._now = 0.0
        self.app = PacingMiddleware(self._run, self._clock)

    def _clock(self) -> float:
        self._now += self.seconds_per_turn
        return self._now

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started.append(scope["method"])

    def send(self, method: str, count: int = 1) -> list[asyncio.Task[None]]:
        async def nothing(*_: Any) -> Any:
            return {}

        scope = {"type": "http", "method": method}
        return [asyncio.create_task(self.app(scope, nothing, nothing)) for _ in range(count)]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_flood_starts_one_request_per_turn() -> None:
    flood = Flood()
    tasks = flood.send("POST", 50)
    await turns(2)
    seen = [len(flood.started)]
    for _ in range(20):
        await turns(1)
        seen.append(len(flood.started))
    assert max(later - earlier for earlier, later in pairwise(seen)) == 1
    assert 10 <= seen[-1] <= 21
    await asyncio.gather(*tasks)
    assert len(flood.started) == 50


async def test_none_starts_while_turns_take_long_and_what_has_no_body_never_waits() -> None:
    flood = Flood()
    flood.seconds_per_turn = 2 * LONGEST_TURN_SECONDS
    tasks = flood.send("POST", 3)
    await turns(20)
    assert flood.started == ["POST"]
    await asyncio.gather(*flood.send("GET"), *flood.send("HEAD"))
    assert flood.started == ["POST", "GET", "HEAD"]
    flood.seconds_per_turn = 0.0
    await asyncio.gather(*tasks)
    assert flood.started.count("POST") == 3


async def test_a_request_that_was_given_up_does_not_stop_the_others() -> None:
    flood = Flood()
    first, second, third = flood.send("POST", 3)
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, third)
    assert flood.started == ["POST", "POST"]
    await asyncio.gather(*flood.send("POST"))
    assert len(flood.started) == 3
