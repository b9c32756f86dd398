"""Runs a chat for another API than chat completions: an adapter turns the parts of the answer into that API's form."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.ingress.asgi import EventStream, timeout_of, while_connected
from cluster.ingress.client import ServiceClient
from cluster.ingress.observability.http_middleware import generate, note_error
from cluster.ingress.openai.errors import ErrorResponse, error_response
from cluster.ingress.openai.formats import ChatFormat, Choice
from cluster.ingress.openai.parsing.answer_parser import AnswerParser
from cluster.ingress.openai.parsing.parts import Json, Part
from cluster.ingress.openai.requests import ChatRequest
from cluster.ingress.openai.responses import receipt, system_fingerprint
from cluster.ingress.openai.translate import chat_request, parameter_names, seed_of
from pilotfish.v1 import generation_pb2

SILENT_SECONDS = 10.0
"""Longest time without an event; then a comment is sent."""
Event = tuple[str, Json]
"""Name and data of a server-sent event."""
Named = Callable[[generation_pb2.GenerateRequest], generation_pb2.GenerateRequest]
Responses = AsyncGenerator[generation_pb2.GenerateResponse, None]


class ChatAdapter(Protocol):
    """Collects one answer. Each method returns the events that a streamed response sends then."""

    def begin(self, started: generation_pb2.GenerationStarted) -> Iterable[Event]:
        """The request was admitted."""
        ...

    def add(self, part: Part) -> Iterable[Event]:
        """More of the answer has arrived."""
        ...

    def score(self, logprobs: Iterable[Json]) -> None:
        """Take the log-probabilities of the tokens whose parts are added next, as chats report them."""
        ...

    def end(self, finished: generation_pb2.GenerationFinished, receipt: Json, *, with_calls: bool) -> Iterable[Event]:
        """The answer has ended, `with_calls` of tools that are whole.

        The receipt says what it took, and how to get it again.
        """
        ...

    def whole(self) -> Json:
        """Return the whole response, after the end."""
        ...

    def error(self, error: ErrorResponse) -> Event:
        """Return the event of an error in a stream."""
        ...


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Name the field of an error as in the API of the client.

    `names` maps regular expressions to replacements. The first one that the beginning of the field matches is used.
    """
    try:
        yield
    except InvalidRequest as error:
        for pattern, own in names.items():
            if (found := re.match(pattern, error.field)) is not None:
                raise error.renamed(found.expand(own) + error.field[found.end() :]) from None
        raise


async def respond(
    request: Request,
    client: ServiceClient,
    limits: LimitsSection,
    named: Named,
    chat: ChatRequest,
    adapter: ChatAdapter,
    headers: Mapping[str, str],
) -> Response:
    """Generate the answer to a chat, and return the adapter's response, streamed if the chat says so."""
    message = chat_request(chat, request.state.request_id, seed_of(chat))
    responses = generate(client, named(message), timeout_of(request, limits.max_timeout_seconds))
    events = _events(responses, ChatFormat.of(chat), adapter)
    try:
        # A refused request fails here, before the status line is sent.
        first = await while_connected(request, _next(events))
        if not chat.stream:
            await while_connected(request, _read(events))
            return JSONResponse(adapter.whole(), headers=dict(headers))
    except InvalidRequest as error:
        await events.aclose()
        raise error.renamed(parameter_names(chat).get(error.field, error.field)) from None
    except BaseException:
        await events.aclose()
        raise
    return EventStream(_sent(request, first, events, adapter), headers, silent_seconds=SILENT_SECONDS)


async def _events(responses: Responses, form: ChatFormat, adapter: ChatAdapter) -> AsyncGenerator[list[Event], None]:
    """Yield the events of each response of the service."""
    choice, started = Choice(0), generation_pb2.GenerationStarted()
    async with aclosing(responses):
        async for response in responses:
            if response.HasField("started"):
                started = response.started
                form.begin(choice, started)
                choice.parser = choice.parser or AnswerParser("", None, None)
                yield list(adapter.begin(started))
            elif choice.parser is None:
                continue
            elif response.HasField("delta"):
                adapter.score(form.logprobs(choice, response.delta))
                parts = choice.parser.parts(response.delta.text)
                yield [event for part in parts for event in adapter.add(part)]
            else:
                choice.finished = response.finished
                parts = choice.parser.last_parts(stopped=choice.is_stopped)
                last = [event for part in parts for event in adapter.add(part)]
                own = receipt(system_fingerprint(started), response.finished, is_lossless=not response.lossy)
                with_calls = choice.parser.ends_with_calls
                yield [*last, *adapter.end(response.finished, own, with_calls=with_calls)]


async def _next(events: AsyncGenerator[list[Event], None]) -> list[Event]:
    return await anext(events)


async def _read(events: AsyncGenerator[list[Event], None]) -> None:
    async for _ in events:
        pass


async def _sent(
    request: Request, first: list[Event], events: AsyncGenerator[list[Event], None], adapter: ChatAdapter
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        for event in first:
            yield _encoded(event)
        try:
            async for some in events:
                for event in some:
                    yield _encoded(event)
        except Exception as error:
            note_error(request, error)
            yield _encoded(adapter.error(error_response(error)))


def _encoded(event: Event) -> bytes:
    name, data = event
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode()
