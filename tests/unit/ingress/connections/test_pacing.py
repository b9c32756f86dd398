"""A flood of requests is let in a few at a time; what has no body never waits."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from cluster.ingress.connections.pacing import AT_ONCE, WINDOW_SECONDS, MarkMiddleware, PacingMiddleware


class Flood:
    """Counts its requests and answers marks when the test says so, on a clock that the test sets."""

    def __init__(self, most_waiting: int = 512) -> None:
        self.started: list[str] = []
        self.sent: list[Message] = []
        self.marks = 0
        self.refused: list[tuple[str, int]] = []
        self.now = 100.0
        self.answers_marks = asyncio.Event()
        self.answers_marks.set()
        self._app = MarkMiddleware(self._run, lambda reason, count: self.refused.append((reason, count)))
        self.app = PacingMiddleware(self._chain, most_waiting, lambda: self.now)

    async def _chain(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What is between the two middlewares. As Serve's proxy, it changes the scopes of requests."""
        assert scope["root_path"] == ""
        scope["root_path"] = "/prefix"
        if scope["method"] == "GET" and scope["headers"]:
            assert (await receive())["body"] == b""
            await self.answers_marks.wait()
            self.marks += 1
        await self._app(copy.deepcopy(scope), receive, send)  # the application runs in another process

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started.append(scope["method"])

    def send(self, method: str, count: int = 1) -> list[asyncio.Task[None]]:
        async def nothing() -> Any:
            return {}

        async def note(message: Message) -> None:
            self.sent.append(message)

        scope = {"type": "http", "method": method, "path": "/v1/completions", "root_path": "", "headers": []}
        return [asyncio.create_task(self.app(dict(scope), nothing, note)) for _ in range(count)]


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _ignore(_: Message) -> None:
    pass


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_flood_comes_in_a_few_at_a_time_behind_marks() -> None:
    flood = Flood()
    flood.answers_marks.clear()
    tasks = flood.send("POST", 3 * AT_ONCE + 2)
    await turns()
    assert (len(flood.started), flood.marks) == (AT_ONCE, 0)
    flood.answers_marks.set()
    await asyncio.gather(*tasks)
    assert (len(flood.started), flood.marks) == (3 * AT_ONCE + 2, 3)
    assert flood.sent == []  # nobody sees the answers to marks


async def test_what_has_no_body_comes_in_at_once() -> None:
    flood = Flood()
    flood.answers_marks.clear()
    tasks = flood.send("POST", 2 * AT_ONCE)
    await asyncio.gather(*flood.send("GET"), *flood.send("HEAD"))
    assert flood.started[AT_ONCE:] == ["GET", "HEAD"]
    flood.answers_marks.set()
    await asyncio.gather(*tasks)


async def test_without_a_flood_nothing_waits_and_no_mark_is_sent() -> None:
    flood = Flood()
    flood.answers_marks.clear()
    for number in range(1, 9):
        flood.send("POST", AT_ONCE)
        await turns()
        assert len(flood.started) == number * AT_ONCE
        flood.now += 1.01 * WINDOW_SECONDS
    assert flood.marks == 0


async def test_more_than_may_wait_are_refused_at_once() -> None:
    flood = Flood(most_waiting=4)
    flood.answers_marks.clear()
    tasks = flood.send("POST", AT_ONCE + 7)
    await turns()
    starts = [message for message in flood.sent if message["type"] == "http.response.start"]
    assert [message["status"] for message in starts] == [429] * 3
    assert all((b"retry-after", b"1") in message["headers"] for message in starts)
    flood.answers_marks.set()
    await asyncio.gather(*tasks)
    assert flood.started == ["POST"] * (AT_ONCE + 4)


async def test_the_application_counts_what_was_refused_before_it() -> None:
    flood = Flood(most_waiting=AT_ONCE + 1)
    flood.answers_marks.clear()
    tasks = flood.send("POST", 2 * AT_ONCE + 4)
    await turns()
    tasks += flood.send("POST", 2)
    await turns()
    flood.answers_marks.set()
    await asyncio.gather(*tasks)
    assert flood.marks == 2
    assert sum(count for _, count in flood.refused) == 5
    assert {reason for reason, _ in flood.refused} == {"Overloaded"}


async def test_a_client_that_sends_a_mark_counts_nothing() -> None:
    flood = Flood()
    scope = {"type": "http", "method": "GET", "headers": [(b"x-pilotfish-mark", b"1"), (b"pacing_refused", b"7")]}
    await flood.app({**scope, "root_path": "", "state": {}}, _no_body, _ignore)
    assert (flood.marks, flood.refused) == (1, [])


async def test_a_request_that_was_given_up_does_not_stop_the_others() -> None:
    flood = Flood()
    flood.answers_marks.clear()
    *before, second, third = flood.send("POST", AT_ONCE + 2)
    await turns()
    second.cancel()
    flood.answers_marks.set()
    await asyncio.gather(*before, third)
    assert len(flood.started) == AT_ONCE + 1
