"""Texts for a distillation from a running server, over its HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from cluster.core.errors import ConfigurationError, InvalidRequest, NotReady, WorkerUnavailable, shorten
from cluster.generation.text.tokenizer import Tokenizer
from deploy.commands.client.connection import get, post, server_client
from deploy.settings import Settings
from pilotfish.v1 import common_pb2, generation_pb2
from workers.model.target_ends import read_config

_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Least pauses before a request is sent again that the server lost or refused because it is busy, in seconds."""
_PROBE = "A text of 25 words, for which (in theory) other tokenizers find other tokens: naïve, 東京, x += 1;"
_TOKEN_ID = "token_id:"  # noqa: S105 - how a token's id is written
_ABORTED = "abort"
"""Why an answer ended that the server did not finish: it stops, or an operator has aborted the request."""
_FORM_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading an answer of another form raises."""


class TextClient(Protocol):
    """Continues prompts. `GenerationClient` is one."""

    def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The tokens of one answer, in one or several deltas. Raises `PilotfishError`."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server that has the target of a distillation."""

    settings: Settings
    url: str
    cacert: str | None = None
    """A file of certificates by which an https server is checked."""

    @asynccontextmanager
    async def client(self, target: Path, name: str, told: Callable[[str], None]) -> AsyncIterator[ServedTexts]:
        """Inside, the server answers. `target` is the target's directory, and `name` that under which it is served.

        `told` gets a line for each request that is sent again. Raises `WorkerUnavailable`, and `ConfigurationError` for
        a server that has another target, as far as names and tokens tell.
        """
        async with server_client(self.settings, self.url, self.cacert) as client:
            try:
                texts = await self._texts(client, target, name, told)
            except _FORM_ERRORS as error:
                raise WorkerUnavailable(
                    f"--url {self.url}: needed id and max_model_len of each model, and the tokens of a text; {error!r}"
                ) from error
            yield texts

    async def _texts(
        self, client: httpx.AsyncClient, target: Path, name: str, told: Callable[[str], None]
    ) -> ServedTexts:
        cards = (await get(client, "/v1/models"))["data"]
        card = next((one for one in cards if one["id"] == name), cards[0] if len(cards) == 1 else None)
        if card is None:
            served = shorten([one["id"] for one in cards])
            raise ConfigurationError(
                f"--url {self.url}: needed target.served_name to be one of {served}, found {name!r}"
            )
        context = int(card["max_model_len"])
        found = await post(client, "/tokenize", {"model": card["id"], "prompt": _PROBE})
        if tuple(found["tokens"]) != Tokenizer.load(target).encode(_PROBE):
            raise ConfigurationError(f"--url {self.url}: its model {card['id']!r} has other tokens than target.path")
        vocabulary = int(read_config(target).get_text_config().vocab_size)
        return ServedTexts(client, card["id"], context, vocabulary, told)


@dataclass(frozen=True, slots=True)
class ServedTexts:
    """The HTTP API of a server. It is a `TextClient`."""

    client: httpx.AsyncClient
    model: str
    context: int
    """Most tokens of a prompt and its answer."""
    vocabulary: int
    """Tokens of the target, beyond which no answer has any."""
    told: Callable[[str], None]

    async def generate(
        self,
        request: generation_pb2.GenerateRequest,
        timeout_seconds: float,  # noqa: ARG002 - the client has a timeout of its own
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the answer, whole. Nothing is learned from it on the server.

        Raises `InvalidRequest` for a prompt that fills the context, `ConfigurationError` for a request that the server
        refuses, and `WorkerUnavailable` or `NotReady` where it gives no answer again and again.
        """
        prompt = list(request.token_ids.ids)
        if len(prompt) >= self.context:
            raise InvalidRequest("prompt", len(prompt), f"below {self.context} tokens")
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": min(request.stopping.max_tokens, self.context - len(prompt)),
            "stop_token_ids": list(request.stopping.stop_token_ids),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "store": False,
        }
        for name in ("temperature", "top_p", "min_p", "seed", "logprobs"):
            if sampling.HasField(name):
                body[name] = getattr(sampling, name)
        answer = await self._answer(body)
        try:
            (choice,) = answer["choices"]
            delta = _delta(choice, body.get("logprobs", 0))
            self._check(delta, body["max_tokens"])
        except _FORM_ERRORS as error:
            raise WorkerUnavailable(f"{self.client.base_url}: needed the token ids of an answer; {error!r}") from error
        yield generation_pb2.GenerateResponse(delta=delta)

    async def _answer(self, body: dict[str, Any]) -> Any:
        for pause in _PAUSES:
            try:
                return await self._whole(body)
            except (NotReady, WorkerUnavailable) as error:
                wait = max(pause, error.retry_after_seconds)
                self.told(f"{error}; asked again in {wait:g} s")
            await asyncio.sleep(wait)
        return await self._whole(body)

    async def _whole(self, body: dict[str, Any]) -> Any:
        """An answer that the server has finished. Raises `NotReady` for another one."""
        answer = await post(self.client, "/v1/completions", body)
        with suppress(*_FORM_ERRORS):
            if answer["choices"][0]["finish_reason"] == _ABORTED:
                raise NotReady(f"{self.client.base_url}: the server aborted the answer")
        return answer

    def _check(self, delta: generation_pb2.GenerationDelta, most_tokens: int) -> None:
        """Raise `ValueError` for more tokens than were asked for, and for tokens that the target does not have."""
        if len(delta.token_ids) > most_tokens:
            raise ValueError(f"{len(delta.token_ids)} tokens, {most_tokens} at most")
        others = (other.token_id for position in delta.logprobs for other in position.top)
        if (largest := max((*delta.token_ids, *others), default=0)) >= self.vocabulary:
            raise ValueError(f"token {largest} of a vocabulary of {self.vocabulary}")


def _delta(choice: Any, alternatives: int) -> generation_pb2.GenerationDelta:
    """The tokens of a choice, and the most probable ones in the place of each, as many as were asked for.

    Raises an error of `_FORM_ERRORS`.
    """
    delta = generation_pb2.GenerationDelta(token_ids=iter(choice["token_ids"]))
    tops = choice["logprobs"]["top_logprobs"] if alternatives else []
    for token, top in zip(delta.token_ids if alternatives else (), tops, strict=True):
        # The token itself is named as well, and is less probable than all others where it is not among them.
        best = sorted(top.items(), key=lambda each: -each[1])[:alternatives]
        if len(best) < alternatives:
            raise ValueError(f"{len(best)} probable tokens, {alternatives} wanted")
        others = [
            common_pb2.TopLogprob(token_id=int(name.removeprefix(_TOKEN_ID)), logprob=value) for name, value in best
        ]
        delta.logprobs.append(common_pb2.TokenLogprobs(token_id=token, top=others))
    return delta
