"""The answers to one HTTP request: the responses to all of its prompts, as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from cluster.core.errors import InvalidRequest, WorkerUnavailable
from cluster.ingress.access.http_access import named
from cluster.ingress.asgi import EventStream, while_connected
from cluster.ingress.client import ServiceClient
from cluster.ingress.observability.request_record import RequestRecord, current
from cluster.ingress.openai.stream import Events
from pilotfish.v1 import generation_pb2

Responses = AsyncGenerator[generation_pb2.GenerateResponse, None]
_First = TypeVar("_First")
_Arrived = tuple[int, generation_pb2.GenerateResponse]


SILENT_SECONDS = 10.0
"""Longest time for which a stream sends nothing, in seconds. Then it begins, or sends a comment."""


@asynccontextmanager
async def beginning(
    request: Request,
    responses: Events,
    first: Coroutine[Any, Any, _First],
    names: Mapping[str, str],
    *,
    streams: bool,
) -> AsyncIterator[asyncio.Task[_First]]:
    """Wait for what the first of the responses brings, which `first` reads, and yield its task.

    A refused request fails here, before the status line of a stream is sent, unless it waits for long. An error ends
    the responses. One of a field has the name that `names` gives to the field.
    """
    begun = asyncio.create_task(first)
    try:
        await while_connected(request, asyncio.wait({begun}, timeout=SILENT_SECONDS if streams else None))
        if begun.done():
            begun.result()
        yield begun
    except InvalidRequest as error:
        await responses.aclose()
        raise error.renamed(names.get(error.field, error.field)) from None
    except BaseException:
        await _end(begun, responses)
        raise


def streamed(
    parts: AsyncGenerator[bytes, None], headers: Mapping[str, str], begun: asyncio.Task[Any], responses: Events
) -> EventStream:
    """Return the parts of an answer that has begun as a stream of events."""
    return EventStream(parts, headers, silent_seconds=SILENT_SECONDS, end=partial(_end, begun, responses))


async def _end(begun: asyncio.Task[Any], responses: Events) -> None:
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    await responses.aclose()


def answers(
    client: ServiceClient,
    requests: Sequence[generation_pb2.GenerateRequest],
    timeout_seconds: float,
    *,
    streams: bool,
) -> Events:
    """Yield `(choice index, event)` in order of arrival. The choices of a prompt are `n` consecutive ones.

    The requests have one `n`, and get the name of the caller. The start of a request is repeated for each of its
    choices. The first error ends all calls; so does closing the iterator. The record of the HTTP request collects the
    events. `streams`: whether the HTTP response sends each event. Raises `WorkerUnavailable` for an answer that was not
    requested.
    """
    record = current.get()
    for request in requests:
        named(request)
        if not streams:
            request.stream = False
        if record is not None:
            record.note_request(request)
    calls = [client.generate(request, timeout_seconds) for request in requests]
    return _joined(calls, max(1, requests[0].n), record)


async def _joined(calls: Sequence[Responses], n: int, record: RequestRecord | None) -> Events:
    async with aclosing(_Arrivals(calls)) as arrivals:
        while (arrived := await arrivals.next()) is not None:
            prompt, event = arrived
            for choice in _choices(prompt, event, n, record):
                yield choice, event


class _Arrivals:
    """The responses of several calls, in order of arrival."""

    def __init__(self, calls: Sequence[Responses]) -> None:
        self._only = calls[0] if len(calls) == 1 else None  # nothing to wait for beside it
        self._arrived: asyncio.Queue[_Arrived | Exception | None] = asyncio.Queue(len(calls))
        self._running = len(calls)
        started = () if self._only is not None else enumerate(calls)
        self._pumps = [asyncio.create_task(self._pump(prompt, call)) for prompt, call in started]

    async def next(self) -> _Arrived | None:
        """Return the next response with the index of its call; `None` after the last one. Raises the first error."""
        if self._only is not None:
            event = await anext(self._only, None)
            return None if event is None else (0, event)
        while self._running:
            entry = await self._arrived.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is not None:
                return entry
            self._running -= 1
        return None

    async def aclose(self) -> None:
        """End all calls."""
        if self._only is not None:
            await self._only.aclose()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, prompt: int, call: Responses) -> None:
        try:
            async with aclosing(call):
                async for event in call:
                    await self._arrived.put((prompt, event))
        except Exception as error:  # `next` raises it
            await self._arrived.put(_of_prompt(prompt, error))
        else:
            await self._arrived.put(None)


def _of_prompt(prompt: int, error: Exception) -> Exception:
    """Return an error of one of several prompts, with the place of the prompt in its field."""
    if isinstance(error, InvalidRequest) and error.field.partition("[")[0] == "prompt":
        return error.renamed(f"prompt[{prompt}]{error.field.removeprefix('prompt')}")
    return error


def _choices(
    prompt: int, event: generation_pb2.GenerateResponse, n: int, record: RequestRecord | None
) -> Iterator[int]:
    """Return the choices that an event belongs to, once it is recorded."""
    if event.index >= n:
        raise WorkerUnavailable(f"answer {event.index} was not requested")
    if record is not None:
        record.note(event)
    indices = range(n) if event.HasField("started") else (event.index,)
    return (prompt * n + index for index in indices)
