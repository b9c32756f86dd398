"""The service's events as one response or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from pydantic_core import to_json

from cluster.core.errors import WorkerUnavailable
from cluster.ingress.openai.coalesce import Events, coalesce
from cluster.ingress.openai.draft_metrics import draft_metrics, note_acceptance
from cluster.ingress.openai.errors import ErrorResponse
from cluster.ingress.openai.event_ids import EventId, EventIds, Stage
from cluster.ingress.openai.formats import Choice, reported_prompt, streamed_prompt
from cluster.ingress.openai.parsing.parts import Json
from cluster.ingress.openai.prompt_report import note_prompt
from cluster.ingress.openai.responses import (
    ResponseMetadata,
    ResponseOptions,
    add_delta,
    delta_choice,
    last_choice,
    usage,
    usage_so_far,
    whole_choice,
)
from pilotfish.v1 import generation_pb2

_Arrived = tuple[int, generation_pb2.GenerateResponse]


async def by_choice(events: Events, n: int) -> Events:
    """Replace the index of the prompt by that of the choice. The choices of a prompt are `n` consecutive ones.

    The start of a request is repeated for each of them.

    Raises `WorkerUnavailable` for an answer that was not requested.
    """
    async with aclosing(events):
        async for prompt, event in events:
            if event.index >= n:
                raise WorkerUnavailable(f"answer {event.index} was not requested")
            answers = range(n) if event.HasField("started") else (event.index,)
            for answer in answers:
                yield prompt * n + answer, event


async def whole_response(
    events: Events, choices: list[Choice], metadata: ResponseMetadata, options: ResponseOptions
) -> Json:
    """Read all events and return the response."""
    async for index, event in events:
        if event.HasField("started"):
            note_prompt(choices[index], event.started, metadata.endpoint, options)
        elif event.HasField("delta"):
            note_acceptance(choices[index], event.delta)
            add_delta(metadata.endpoint, choices[index], event.delta, options)
        elif event.HasField("finished"):
            choices[index].finished = _ended(event.finished, options)
    complete = [whole_choice(metadata.endpoint, choice, options) | metadata.receipt(choice) for choice in choices]
    prompt = {} if metadata.endpoint.reports_prompt_per_choice else reported_prompt(choices[0])
    return metadata.wrap(complete, chunk=False, usage=usage(choices), **draft_metrics(choices), **prompt)


async def chunks(
    events: Events,
    choices: list[Choice],
    metadata: ResponseMetadata,
    options: ResponseOptions,
    last: EventId,
    on_error: Callable[[Exception], ErrorResponse],
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events: one per commit, the usage if requested, `[DONE]`. Each has an id.

    `last` says what was sent before. An error becomes an event too, because the status line is already sent.
    """
    stage, ids = last.stage, EventIds(last, choices)

    def note(index: int, delta: generation_pb2.GenerationDelta) -> None:
        note_acceptance(choices[index], delta)

    if is_joined := options.interval > 1:
        events = coalesce(events, options.interval, note)
    try:
        async for index, event in events:
            if not is_joined:
                note(index, event.delta)
            chunk = _chunk(metadata, choices[index], event, options)
            if chunk is not None:
                yield _server_sent(chunk, ids.next(stage))
        if options.usage and stage is Stage.CHOICES:
            stage = Stage.USAGE
            summary = metadata.wrap([], chunk=True, usage=usage(choices), **draft_metrics(choices))
            yield _server_sent(summary, ids.next(stage))
    except Exception as error:
        yield _with_id(on_error(error).body(), ids.next(stage))
    else:
        stage = Stage.DONE
    finally:
        await events.aclose()
    yield _with_id(b"[DONE]", ids.next(stage))


async def late(
    arrival: asyncio.Future[_Arrived],
    begin: Callable[[_Arrived], AsyncGenerator[bytes, None]],
    events: Events,
    on_error: Callable[[Exception], ErrorResponse],
) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a response that begins before its first event has arrived.

    An error of the first event becomes an event too.
    """
    try:
        parts = begin(await arrival)
        async with aclosing(parts):
            async for part in parts:
                yield part
    except Exception as error:
        yield b"data: " + on_error(error).body() + b"\n\n"
        yield b"data: [DONE]\n\n"
    finally:
        arrival.cancel()
        await asyncio.gather(arrival, return_exceptions=True)
        await events.aclose()


def _chunk(
    metadata: ResponseMetadata, choice: Choice, event: generation_pb2.GenerateResponse, options: ResponseOptions
) -> Json | None:
    """Return the chunk of one event, or `None` if the event holds nothing for the client."""
    endpoint, is_first = metadata.endpoint, not choice.is_started
    if event.HasField("started"):
        note_prompt(choice, event.started, endpoint, options)
        return None
    if event.HasField("delta"):
        content = delta_choice(endpoint, choice, event.delta, options)
        if content is None:
            return None
    else:
        choice.finished = _ended(event.finished, options)
        content = last_choice(endpoint, choice, options) | metadata.receipt(choice)
    more: dict[str, Json | None] = {}
    if options.usage:
        more["usage"] = usage_so_far(choice) if options.every_usage else None
    if is_first and not endpoint.reports_prompt_per_choice:
        more |= streamed_prompt(choice)
    return metadata.wrap([content], chunk=True, **more)


def _ended(finished: generation_pb2.GenerationFinished, options: ResponseOptions) -> generation_pb2.GenerationFinished:
    """Return the end of an answer. One that is not sent has no tokens and ends as one of no length."""
    if options.only_echoes:
        finished.usage.completion_tokens = 0
        finished.reason = generation_pb2.FINISH_REASON_LENGTH
    return finished


def _server_sent(payload: Json, event_id: str) -> bytes:
    return _with_id(to_json(payload), event_id)


def _with_id(data: bytes, event_id: str) -> bytes:
    return b"id: " + event_id.encode() + b"\ndata: " + data + b"\n\n"
