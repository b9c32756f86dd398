"""A streamed chat answer: read over HTTP, timed at the client, printed with its drafted tokens marked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from cluster.core.errors import WorkerUnavailable
from cluster.ingress.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one commit. The first `accepted` were drafted; the target generated the others."""

    tokens: tuple[int, ...]
    accepted: int


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


def stream_chat(url: str, body: dict[str, Any], timeout_seconds: float) -> Iterator[Chunk]:
    """Post a streaming chat completion and yield one chunk per commit. Raises `WorkerUnavailable`."""
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=timeout_seconds) as response:
            if response.status_code != httpx.codes.OK:
                raise WorkerUnavailable(f"{url} answered {response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                chunk = _parse_event(line)
                if chunk is not None and chunk.tokens:
                    yield chunk
    except httpx.TransportError as error:
        raise WorkerUnavailable(f"{url} closed the connection: {error!r}") from None


def measure(chunks: Iterator[Chunk], on_chunk: Callable[[Chunk], None]) -> TimedAnswer:
    """Read a stream to its end, pass each chunk to `on_chunk`, and time it. Raises `WorkerUnavailable` if empty."""
    begun = time.perf_counter()
    arrivals: list[float] = []
    received: list[Chunk] = []
    for chunk in chunks:
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
    )


def _parse_event(line: str) -> Chunk | None:
    """The chunk in one line of a server-sent event stream, if it has one. Raises `WorkerUnavailable` for an error."""
    payload = line.removeprefix("data: ")
    if payload == line or payload == "[DONE]":
        return None
    event = json.loads(payload)
    if "error" in event:
        raise WorkerUnavailable(f"the server ended the answer with an error: {event['error']}")
    choice = event["choices"][0]
    return Chunk(tuple(choice.get("token_ids", ())), int(choice.get("accepted_draft_tokens", 0)))
