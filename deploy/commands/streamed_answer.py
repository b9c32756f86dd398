"""A streamed chat answer: read over HTTP, timed at the client, printed with its drafted tokens marked."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from cluster.core.errors import WorkerUnavailable
from cluster.generation.text.tokenizer import Tokenizer
from deploy.network.https_client import why_silent

_DONE = "[DONE]"
_RETRY_SECONDS = 0.2
_TEMPORARY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE)
"""Status codes of a server that may answer later."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one commit. The first `accepted` were drafted; the target generated the others."""

    tokens: tuple[int, ...]
    accepted: int
    accepted_by_origin: Mapping[str, int] = field(default_factory=dict)
    """Where the accepted tokens of the whole answer come from; only in the last chunk, which has no tokens."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One streamed answer with the client's measurements."""

    tokens: tuple[int, ...]
    first_tokens: int
    """Number of tokens in the first chunk."""
    steps: int
    """Number of chunks: the target commits one per step."""
    accepted: int
    """Number of drafted tokens that the target accepted."""
    seconds: float
    """Decoding time in seconds, from the first chunk to the last."""
    first_seconds: float
    """Time from the request to the first chunk, in seconds."""
    accepted_by_origin: Mapping[str, int] = field(default_factory=dict)
    """Where the accepted tokens come from, as the receipt of the answer says."""

    @property
    def tokens_per_second(self) -> float:
        """Decoding rate. It leaves out the first chunk and its time, which belong to the prompt."""
        return (len(self.tokens) - self.first_tokens) / self.seconds if self.seconds else 0.0


class MarkedPrinter:
    """Prints an answer as it arrives: drafted tokens in green, or in brackets where there is no colour."""

    def __init__(self, output: Console, tokenizer: Tokenizer) -> None:
        self._output = output
        self._stream = tokenizer.detokenizer()
        self._brackets = not output.is_terminal
        self._bracket_open = False

    def write(self, chunk: Chunk) -> None:
        """Print the tokens of one commit."""
        for position, token in enumerate(chunk.tokens):
            text = self._stream.push(token)
            if text:
                drafted = position < chunk.accepted
                self._set_bracket(drafted)
                self._output.print(Text(text, "bold green" if drafted else "default"), end="")

    def end(self) -> None:
        """Print the text that the detokenizer has buffered, and end the line."""
        self._set_bracket(False)
        self._output.print(Text(self._stream.flush()))

    def _set_bracket(self, drafted: bool) -> None:
        if self._brackets and drafted != self._bracket_open:
            self._output.print(Text("[" if drafted else "]"), end="")
            self._bracket_open = drafted


def stream_chat(
    url: str,
    body: dict[str, Any],
    timeout_seconds: float,
    headers: Mapping[str, str] = MappingProxyType({}),
    tls: ssl.SSLContext | None = None,
) -> Iterator[Chunk]:
    """Post a streaming chat completion and yield one chunk per commit, and one for its end. Raises `WorkerUnavailable`.

    A stream that breaks off is continued after its last event, at whichever server listens at the URL by then.
    """
    deadline = time.monotonic() + timeout_seconds
    last_event_id = ""
    while True:
        try:
            for event_id, payload in _events(
                f"{url}/v1/chat/completions", body, headers, last_event_id, timeout_seconds, tls
            ):
                last_event_id = event_id
                if payload == _DONE:
                    return
                chunk = _parse_chunk(payload)
                if chunk.tokens or chunk.accepted_by_origin:
                    yield chunk
            reason = "the stream ended before the answer was complete"
        except httpx.TransportError as error:
            reason = why_silent(error)
        except _Unanswered as error:
            reason = str(error)
        if not last_event_id or time.monotonic() >= deadline:
            raise WorkerUnavailable(f"{url} closed the connection: {reason}")
        time.sleep(_RETRY_SECONDS)


class _Unanswered(Exception):
    """The server cannot answer now."""


def _events(
    url: str,
    body: dict[str, Any],
    headers: Mapping[str, str],
    last_event_id: str,
    timeout_seconds: float,
    tls: ssl.SSLContext | None,
) -> Iterator[tuple[str, str]]:
    """Yield id and data of the events after `last_event_id`, or of all. Raises `WorkerUnavailable`, `_Unanswered`."""
    headers = {**headers, "Last-Event-ID": last_event_id} if last_event_id else headers
    event_id = last_event_id
    verify = True if tls is None else tls
    with httpx.stream("POST", url, json=body, headers=headers, timeout=timeout_seconds, verify=verify) as response:
        if response.status_code != httpx.codes.OK:
            message = f"{url} answered {response.status_code}: {response.read().decode()}"
            if response.status_code in _TEMPORARY:
                raise _Unanswered(message)
            raise WorkerUnavailable(message)
        for line in response.iter_lines():
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                yield event_id, line.removeprefix("data: ")


def measure(chunks: Iterator[Chunk], on_chunk: Callable[[Chunk], None]) -> TimedAnswer:
    """Read a stream to its end, pass each chunk to `on_chunk`, and time it. Raises `WorkerUnavailable` if empty."""
    begun = time.perf_counter()
    arrivals: list[float] = []
    received: list[Chunk] = []
    origins: Mapping[str, int] = {}
    for chunk in chunks:
        origins = chunk.accepted_by_origin or origins
        if not chunk.tokens:
            continue
        arrivals.append(time.perf_counter() - begun)
        received.append(chunk)
        on_chunk(chunk)
    if not received:
        raise WorkerUnavailable("the answer was empty")
    return TimedAnswer(
        tokens=tuple(token for chunk in received for token in chunk.tokens),
        first_tokens=len(received[0].tokens),
        steps=len(received),
        accepted=sum(chunk.accepted for chunk in received),
        seconds=arrivals[-1] - arrivals[0],
        first_seconds=arrivals[0],
        accepted_by_origin=origins,
    )


def _parse_chunk(payload: str) -> Chunk:
    """The chunk in the data of one server-sent event. Raises `WorkerUnavailable` for an error."""
    event = json.loads(payload)
    if "error" in event:
        raise WorkerUnavailable(f"the server ended the answer with an error: {event['error']}")
    choice = event["choices"][0]
    origins = choice.get("receipt", {}).get("accepted_by_origin", {})
    return Chunk(tuple(choice.get("token_ids", ())), int(choice.get("accepted_draft_tokens", 0)), origins)
