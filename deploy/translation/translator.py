"""Translates texts with an OpenAI-compatible server: each text is the prompt of a completion."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import httpx

from cluster.core.errors import ConfigurationError, InvalidRequest, WorkerUnavailable
from deploy.network.https_client import (
    JSON_HEADERS,
    TEMPORARY,
    check_reachable,
    json_of,
    refusal_hint,
    to_json,
    why_silent,
)

_RETRY_SECONDS = 0.5
_WAITING_PER_SLOT = 4
"""Results that may wait for an earlier one, per item that is worked on at once."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TranslateOptions:
    """How texts are translated."""

    max_tokens: int = 256
    """Most tokens of a translation."""
    beams: int = 1
    """Number of beams; 1 takes the most probable token at every position."""
    patience_seconds: float = 60.0
    """How long a server that is busy or away is asked again."""

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("beams", self.beams)):
            if value < 1:
                raise InvalidRequest(name, value, "at least 1")

    def fields(self) -> Mapping[str, Any]:
        """The fields of the request besides model and prompt."""
        search = {"use_beam_search": True, "best_of": self.beams} if self.beams > 1 else {}
        return MappingProxyType({"temperature": 0, "max_tokens": self.max_tokens, **search})


@dataclass(frozen=True, slots=True)
class Translation:
    """One translated text."""

    text: str
    tokens: int = 0
    is_cut: bool = False
    """Whether it ended because it had the most tokens."""


class RefusedText(InvalidRequest):
    """The server refuses a request. The message is the server's."""

    def __init__(self, message: str) -> None:
        super().__init__("text", "", "")
        self.args = (message,)

    def of_line(self, number: int) -> RefusedText:
        """Return the same error with the number of the text's line in front."""
        return RefusedText(f"line {number}: {self}")


class Translator:
    """A client of one server and one of its models."""

    def __init__(self, client: httpx.AsyncClient, url: str, options: TranslateOptions) -> None:
        """`url` is the server's address, with or without the path `/v1`."""
        self._client = client
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        self._options = options
        self.model = ""
        """The name of the model, once `choose_model` has found it."""

    async def choose_model(self, name: str | None) -> None:
        """Choose the model by name, or the first one that the server lists.

        Raises `ConfigurationError` if the server says that it is no encoder-decoder model, and `WorkerUnavailable`.
        """
        await check_reachable(self._client)
        cards = (await self._asked("GET", "/models", None)).get("data", [])
        found = next((card for card in cards if name in (None, card.get("id"))), None)
        if found is None:
            known = ", ".join(str(card.get("id")) for card in cards)
            raise ConfigurationError(f"model: needed one that {self._url} serves ({known}), found {name}")
        if found.get("kind", "encoder-decoder") != "encoder-decoder":
            raise ConfigurationError(
                f"model: needed an encoder-decoder model, found {found['id']}, which continues a text; "
                "choose one with --model, for example opus-mt-fr-en"
            )
        self.model = str(found["id"])

    async def translate(self, text: str) -> Translation:
        """Translate one text; a text of white space stays empty. Raises `RefusedText`, `WorkerUnavailable`."""
        if not text.strip():
            return Translation("")
        body = {"model": self.model, "prompt": text, **self._options.fields()}
        answer = await self._asked("POST", "/completions", body)
        choice = answer["choices"][0]
        tokens = int((answer.get("usage") or {}).get("completion_tokens", 0))
        return Translation(str(choice["text"]), tokens, choice.get("finish_reason") == "length")

    async def _asked(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """Return the server's answer. A server that is busy or away is asked again."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._options.patience_seconds
        content = None if body is None else to_json(body)
        while True:
            try:
                url = f"{self._url}{path}"
                response = await self._client.request(method, url, content=content, headers=JSON_HEADERS)
            except httpx.HTTPError as error:
                reason = f"{self._url}{path}: {why_silent(error)}"
            else:
                if response.status_code == httpx.codes.OK:
                    return json_of(response)
                reason = f"{self._url}{path} answered {response.status_code}: {response.text[:500]}"
                reason += refusal_hint(response.status_code)
                if response.status_code not in TEMPORARY:
                    raise _refusal(response, reason)
            if clock() >= deadline:
                raise WorkerUnavailable(reason)
            await asyncio.sleep(_RETRY_SECONDS)


def _refusal(response: httpx.Response, reason: str) -> RefusedText | WorkerUnavailable:
    """The error of a request that the server refuses or cannot answer."""
    if response.status_code != httpx.codes.BAD_REQUEST:
        return WorkerUnavailable(reason)
    try:
        return RefusedText(str(response.json()["error"]["message"]))
    except (ValueError, LookupError, TypeError):
        return WorkerUnavailable(reason)


async def in_order(
    items: Sequence[Item], work: Callable[[Item], Awaitable[Result]], in_flight: int
) -> AsyncGenerator[Result, None]:
    """Yield `work(item)` for every item, in order. At most `in_flight` items are worked on at once.

    The first exception, in the order of the items, ends everything that still runs.
    """
    slots = asyncio.Semaphore(in_flight)
    tasks: deque[asyncio.Task[Result]] = deque()

    async def one(item: Item) -> Result:
        async with slots:
            return await work(item)

    try:
        for item in items:
            tasks.append(asyncio.create_task(one(item)))
            if len(tasks) > _WAITING_PER_SLOT * in_flight:
                yield await tasks.popleft()
        while tasks:
            yield await tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
