"""The service's events as one response or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from cluster.core.errors import WorkerUnavailable
from cluster.ingress.openai.errors import ErrorResponse
from cluster.ingress.openai.event_ids import EventId, Stage
from cluster.ingress.openai.formats import Choice, EndpointFormat, Json
from cluster.ingress.openai.responses import (
    ResponseMetadata,
    ResponseOptions,
    add_delta,
    delta_choice,
    last_choice,
    usage,
    whole_choice,
)
from pilotfish.v1 import generation_pb2

Events = AsyncGenerator[tuple[int, generation_pb2.GenerateResponse], None]
"""Pairs of an index and an event."""


async def by_choice(events: Events, n: int) -> Events:
    """Replace the index of the prompt by that of the choice. The choices of a prompt are `n` consecutive ones.

    Raises `WorkerUnavailable` for an answer that was not requested.
    """
    async with aclosing(events):
        async for prompt, event in events:
            if event.index >= n:
                raise WorkerUnavailable(f"answer {event.index} was not requested")
            yield prompt * n + event.index, event


async def whole_response(
    events: Events, choices: list[Choice], metadata: ResponseMetadata, options: ResponseOptions
) -> Json:
    """Read all events and return the response."""
    async for index, event in events:
        if event.HasField("delta"):
            add_delta(metadata.endpoint, choices[index], event.delta)
        elif event.HasField("finished"):
            choices[index].finished = event.finished
    complete = [whole_choice(metadata.endpoint, choice, options) for choice in choices]
    return metadata.wrap(complete, chunk=False, usage=usage(choices))


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
    no_usage = {"usage": None} if options.usage else {}
    stage = last.stage
    try:
        async for index, event in events:
            choice = _chunk_choice(metadata.endpoint, choices[index], event, options)
            if choice is not None:
                yield _server_sent(metadata.wrap([choice], chunk=True, **no_usage), last.after(choices, stage))
        if options.usage and stage is Stage.CHOICES:
            stage = Stage.USAGE
            yield _server_sent(metadata.wrap([], chunk=True, usage=usage(choices)), last.after(choices, stage))
    except Exception as error:
        yield _with_id(on_error(error).body(), last.after(choices, stage))
    else:
        stage = Stage.DONE
    finally:
        await events.aclose()
    yield _with_id(b"[DONE]", last.after(choices, stage))


def note_prompt(choice: Choice, started: generation_pb2.GenerationStarted) -> None:
    """Set the prompt length in the usage of an answer that an earlier response has completed."""
    if choice.finished is not None:
        choice.finished.usage.prompt_tokens = started.prompt_tokens


def _chunk_choice(
    endpoint: EndpointFormat, choice: Choice, event: generation_pb2.GenerateResponse, options: ResponseOptions
) -> Json | None:
    if event.HasField("delta"):
        return delta_choice(endpoint, choice, event.delta, options)
    if event.HasField("finished"):
        choice.finished = event.finished
        return last_choice(endpoint, choice)
    note_prompt(choice, event.started)
    return None


def _server_sent(payload: Json, event_id: str) -> bytes:
    return _with_id(json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode(), event_id)


def _with_id(data: bytes, event_id: str) -> bytes:
    return b"id: " + event_id.encode() + b"\ndata: " + data + b"\n\n"
