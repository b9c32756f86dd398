"""Runs a chat for another API than chat completions: an adapter turns the parts of the answer into that API's form."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from cluster.core.answer_format import TEXT_ONLY
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.ingress.answers import answers, beginning, streamed
from cluster.ingress.asgi import timeout_of, while_connected
from cluster.ingress.client import ServiceClient
from cluster.ingress.observability.http_middleware import failed
from cluster.ingress.openai.errors import ErrorResponse
from cluster.ingress.openai.formats import ChatFormat, Choice
from cluster.ingress.openai.parsing.answer_parser import AnswerParser
from cluster.ingress.openai.parsing.parts import Json, Part
from cluster.ingress.openai.requests import ChatRequest
from cluster.ingress.openai.responses import receipt, system_fingerprint
from cluster.ingress.openai.stream import Events
from cluster.ingress.openai.translate import chat_request, parameter_names, seed_of
from pilotfish.v1 import generation_pb2

Event = tuple[str, Json]
"""Name and data of a server-sent event."""
Names = Mapping[str, str | InvalidRequest]
"""Names of an API for fields that chats name otherwise; see `own_names`."""


class ChatAdapter(Protocol):
    """Collects one answer. Each method returns the events that a streamed response sends then."""

    @property
    def names(self) -> Names:
        """Names of the API for fields that chats name otherwise."""

    def begin(self, started: generation_pb2.GenerationStarted) -> Iterable[Event]:
        """The request was admitted."""

    def add(self, part: Part) -> Iterable[Event]:
        """More of the answer has arrived."""

    def score(self, logprobs: Iterable[Json]) -> None:
        """Take the log-probabilities of the tokens whose parts are added next, as chats report them."""

    def end(self, finished: generation_pb2.GenerationFinished, receipt: Json, *, with_calls: bool) -> Iterable[Event]:
        """The answer has ended, `with_calls` of tools that are whole.

        The receipt says what it took, and how to get it again.
        """

    def whole(self) -> Json:
        """Return the whole response, after the end."""

    def error(self, error: ErrorResponse) -> Event:
        """Return the event of an error in a stream."""


@contextmanager
def own_names(names: Names) -> Iterator[None]:
    """Name the field of an error as in the API of the client.

    `names` maps regular expressions to replacements, or to an error that takes the place of the whole error. The first
    one that the beginning of the field matches is used.
    """
    try:
        yield
    except InvalidRequest as error:
        raise _named(error, names) from None


def _named(error: InvalidRequest, names: Names) -> InvalidRequest:
    for pattern, own in names.items():
        if (found := re.match(pattern, error.field)) is not None:
            if isinstance(own, InvalidRequest):
                return own
            return error.renamed(found.expand(own) + error.field[found.end() :])
    return error


def with_one_system(turns: Sequence[Json]) -> list[Json]:
    """Return messages of which the first ones, of the system and of the developer behind it, are one.

    Many templates take one message of the system, at the beginning alone: others raise an error, or are not shown.
    """
    joined = [*turns]
    while len(joined) > 1 and joined[0]["role"] == "system" and joined[1]["role"] in ("system", "developer"):
        joined[:2] = [{"role": "system", "content": f"{joined[0]['content']}\n{joined[1]['content']}"}]
    return joined


async def respond(
    request: Request,
    client: ServiceClient,
    limits: LimitsSection,
    chat: ChatRequest,
    adapter: ChatAdapter,
    headers: Mapping[str, str],
) -> Response:
    """Generate the answer to a chat, and return the adapter's response, streamed if the chat says so."""
    message, names = chat_request(chat, request.state.request_id, seed_of(chat)), parameter_names(chat)
    timeout = timeout_of(request, limits.max_timeout_seconds)
    responses = answers(client, [message], timeout, streams=chat.stream)
    answer = _Answer(ChatFormat.of(chat), adapter)
    async with beginning(request, responses, answer.first(responses), names, streams=chat.stream) as first:
        if not chat.stream:
            await while_connected(request, answer.read(responses))
            return JSONResponse(adapter.whole(), headers=dict(headers))

    def on_error(error: Exception) -> ErrorResponse:
        if isinstance(error, InvalidRequest):
            error = _named(error.renamed(names.get(error.field, error.field)), adapter.names)
        return failed(request, error)

    return streamed(_sent(first, responses, answer, on_error), headers, first, responses)


class _Answer:
    """The one answer to a chat, while it is received."""

    def __init__(self, form: ChatFormat, adapter: ChatAdapter) -> None:
        self.adapter = adapter
        self._form = form
        self._choice = Choice(0)
        self._parser = AnswerParser("", TEXT_ONLY)
        self._started = generation_pb2.GenerationStarted()

    async def first(self, responses: Events) -> list[Event]:
        """Return the events of the first response."""
        _, response = await anext(responses)
        return self.add(response)

    async def read(self, responses: Events) -> None:
        """Take all responses."""
        async for _, response in responses:
            self.add(response)

    def add(self, response: generation_pb2.GenerateResponse) -> list[Event]:
        """Return the adapter's events of one response of the service."""
        if response.HasField("started"):
            self._started = response.started
            self._form.begin(self._choice, response.started)
            self._parser = self._choice.parser or self._parser
            return list(self.adapter.begin(response.started))
        if response.HasField("delta"):
            self.adapter.score(self._form.logprobs(self._choice, response.delta))
            return self._added(self._parser.parts(response.delta.text))
        self._choice.finished = response.finished
        last = self._added(self._parser.last_parts(stopped=self._choice.is_stopped))
        own = receipt(system_fingerprint(self._started), response.finished, is_lossless=not response.lossy)
        end = self.adapter.end(response.finished, own, with_calls=self._parser.ends_with_calls)
        return [*last, *end]

    def _added(self, parts: Iterable[Part]) -> list[Event]:
        return [event for part in parts for event in self.adapter.add(part)]


async def _sent(
    first: Awaitable[list[Event]], responses: Events, answer: _Answer, on_error: Callable[[Exception], ErrorResponse]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(responses):
        try:
            for event in await first:
                yield _encoded(event)
            async for _, response in responses:
                for event in answer.add(response):
                    yield _encoded(event)
        except Exception as error:
            yield _encoded(answer.adapter.error(on_error(error)))


def _encoded(event: Event) -> bytes:
    name, data = event
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode()
