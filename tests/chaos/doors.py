"""Ways into a cluster, over gRPC and over HTTP. A client that has lost one continues at another."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from cluster.core.errors import Aborted, NotReady, Overloaded, WorkerUnavailable
from cluster.wire.generation_client import GenerationClient
from pilotfish.v1 import generation_pb2
from tests.soak.requests import SoakRequest

MODEL = "chaos"
_TEMPORARY = (429, 500, 502, 503, 504)


class Lost(Exception):
    """The connection was lost, or the server refuses for now. What was received stays valid."""


@dataclass
class Received:
    """What a client has received of one request."""

    answers: dict[int, list[int]]
    finished: set[int] = field(default_factory=set)
    last_event_id: str = ""
    door: str = ""
    """The kind of door, for logs."""
    pause: float = 0.0
    """The longest time without a token, in seconds."""
    latest: float = field(default_factory=time.monotonic)

    @property
    def has_begun(self) -> bool:
        """Whether anything was received."""
        return any(self.answers.values()) or bool(self.finished)

    def add(self, index: int, tokens: list[int]) -> None:
        """Record tokens that have arrived now."""
        if tokens:
            now = time.monotonic()
            self.latest, self.pause = now, max(self.pause, now - self.latest)
            self.answers[index].extend(tokens)


class Door(Protocol):
    """One way in. `read` returns when the answers are complete. Raises `Lost`, and errors of the service."""

    async def read(self, name: str, request: SoakRequest, received: Received, seconds: float) -> None:
        """Stream what follows the part received so far."""
        ...


class GrpcDoor:
    """Over gRPC. A request that continues names the tokens that it has."""

    def __init__(self, client: GenerationClient) -> None:
        self.client = client

    async def read(self, name: str, request: SoakRequest, received: Received, seconds: float) -> None:
        received.door = "gRPC"
        message = request.message(name)
        if received.has_begun:
            resume(message, received)
        try:
            async for response in self.client.generate(message, seconds):
                if response.HasField("delta"):
                    received.add(response.index, list(response.delta.token_ids))
                if response.HasField("finished"):
                    received.finished.add(response.index)
        except (NotReady, WorkerUnavailable, Overloaded, Aborted) as error:
            raise Lost(str(error)) from error


class HttpDoor:
    """Over HTTP, as server-sent events. A request that continues names the last event."""

    def __init__(self, client: httpx.AsyncClient, url: Callable[[], str], model: str = MODEL) -> None:
        """`url` returns the URL of a server, or an empty text while none serves. `model` is the name that it serves."""
        self._client = client
        self._url = url
        self._model = model

    async def read(self, name: str, request: SoakRequest, received: Received, seconds: float) -> None:
        received.door = "HTTP"
        url, headers = self._url(), {"x-request-id": name}
        if not url:
            raise Lost("no ingress is serving")
        if received.last_event_id:
            headers["last-event-id"] = received.last_event_id
        try:
            async with self._client.stream(
                "POST", f"{url}/v1/completions", json=_body(request, self._model), headers=headers, timeout=seconds
            ) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode()
                    if response.status_code in _TEMPORARY:
                        raise Lost(text)
                    raise ConnectionError(f"HTTP {response.status_code}: {text}")
                await _read_events(response, received)
        except httpx.TransportError as error:
            raise Lost(repr(error)) from error


async def _read_events(response: httpx.Response, received: Received) -> None:
    event_id = received.last_event_id
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise Lost(str(event["error"]))
            received.last_event_id = event_id
            for choice in event["choices"]:
                received.add(choice["index"], choice.get("token_ids") or [])
                if choice.get("finish_reason"):
                    received.finished.add(choice["index"])
    raise Lost("the stream ended before the answer was complete")


def _body(request: SoakRequest, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "prompt": list(request.prompt), "max_tokens": request.max_tokens}
    body |= {"temperature": request.temperature, "top_p": request.top_p, "seed": request.seed, "n": request.n}
    body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
    if request.pattern:
        body |= {"ignore_eos": False, "structured_outputs": {"regex": request.pattern}}
    return body | ({"cache_salt": request.cache_salt} if request.cache_salt else {})


def resume(message: generation_pb2.GenerateRequest, received: Received) -> None:
    """Put what was received into a request, so that only the rest is streamed."""
    for index, tokens in received.answers.items():
        if tokens or index in received.finished:
            is_finished = index in received.finished
            message.resume.add(index=index, token_count=len(tokens), token_ids=tokens, finished=is_finished)
