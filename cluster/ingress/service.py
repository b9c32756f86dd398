"""The room behind both doors: validate, tokenize, let the coordinator work, detokenize."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Protocol

from cluster.core.config import LimitsSection
from cluster.core.errors import InvalidRequest, NotReady, TargetUnavailable
from cluster.core.ids import RequestId
from cluster.core.request import Commit, GenerationRequest
from cluster.core.verification import TargetInfo
from cluster.ingress import checks, validate
from cluster.ingress.text.output import Delta, Event, Finished, Started
from cluster.ingress.text.outputs import Answers, choose
from cluster.ingress.text.tokenizer import Tokenizer
from cluster.ingress.validate import ChatPrompt, Prompt, TextPrompt, TokenPrompt, ValidatedRequest
from pilotfish.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a client may know of the model that answers."""

    name: str
    created: int
    """When it was loaded, in seconds since the epoch."""
    max_context_len: int
    vocabulary_size: int
    draft_method: str
    is_lossless: bool
    """Whether answers are what the model alone would have written."""


class Engine(Protocol):
    """What the room needs of the coordinator."""

    @property
    def info(self) -> TargetInfo:
        """The target behind it; there once `ready`."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
        """Its answers, each with one commit that has `finish`; closing it frees what they hold.

        Raises `Overloaded`, `NotReady` or `InvalidRequest` at the first step, `DeadlineExceeded` later.
        """
        ...

    def conclude(self, request_id: RequestId, index: int) -> bool:
        """End one running answer with `STOP`: its reader found the end. Whether there was one."""
        ...

    def abort(self, request_id: RequestId) -> bool:
        """End a request's running answers with `ABORT`; whether there was one."""
        ...


class Generation:
    """Answers requests over one engine and one tokenizer."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        limits: LimitsSection,
        *,
        draft_method: str = "none",
        clock: Callable[[], float] = time.monotonic,
        created: float | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits
        self._draft_method = draft_method
        self._clock = clock
        self._created = int(time.time() if created is None else created)
        self._running: set[RequestId] = set()

    async def generate(
        self, message: generation_pb2.GenerateRequest, seconds_left: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """`Started`; for each answer a `Delta` per commit, and `Finished`. Closing it frees everything they held.

        Nothing comes before the first commit, so that every refusal comes before anything. Raises `InvalidRequest`,
        `UnknownModel`, `NotReady`, `Overloaded`, `DeadlineExceeded`, `TargetUnavailable`.
        """
        info = self._info()
        longest = self._limits.max_timeout_seconds
        deadline = self._clock() + (longest if seconds_left is None else min(seconds_left, longest))
        valid = validate.validate(message, info, self._limits, info.eos_token_ids or self._tokenizer.eos_token_ids)
        with self._named(valid.request_id):
            prompt = await self._encode(valid.prompt, info)
            request = validate.admit(valid, prompt, info, self._limits, deadline)
            started: Started | None = Started(request.request_id, info.model, request.sampling.seed, len(prompt))
            async with aclosing(self._given(request, valid)) as events:
                async for event in events:
                    if started is not None:
                        yield started
                        started = None
                    yield event

    async def _given(
        self, request: GenerationRequest, valid: ValidatedRequest
    ) -> AsyncGenerator[Delta | Finished, None]:
        """What the client reads of the answers: all as they come, or the best once all are there."""
        made: list[Delta | Finished] = []
        async with aclosing(self._made(request)) as events:
            async for event in events:
                if valid.plurality.chosen:
                    made.append(event)
                else:
                    yield event
        for event in choose(made, valid.plurality.given, logprobs=valid.sampling.logprobs is not None):
            yield event

    async def _made(self, request: GenerationRequest) -> AsyncGenerator[Delta | Finished, None]:
        """What the engine commits, as events of `request.n` answers."""
        answers = Answers(request, self._tokenizer.stream)
        last: tuple[Delta | Finished, ...] = ()
        async with aclosing(self._engine.generate(request)) as commits:
            async for commit in commits:
                events = answers.take(commit)
                if commit.finish is None and events and isinstance(events[-1], Finished):
                    self._engine.conclude(request.request_id, commit.index)
                if answers.done:
                    last = events
                    break  # the engine is let go before the last words are sent
                for event in events:
                    yield event
        if not answers.done:
            raise TargetUnavailable(f"the answer to {request.request_id} broke off")
        for event in last:
            yield event

    def abort(self, request_id: str) -> bool:
        """Stop a running request; its answers end with `ABORT`. Raises `InvalidRequest` (`request_id`)."""
        return self._engine.abort(validate.check_request_id(request_id))

    async def tokenize(self, message: generation_pb2.TokenizeRequest) -> tuple[int, ...]:
        """Token ids of text or a conversation. Raises `InvalidRequest`, `UnknownModel`, `NotReady`."""
        validate.check_model(message.model if message.HasField("model") else None, self._info())
        match message.WhichOneof("input"):
            case "chat":
                messages = validate.chat(message.chat, self._limits)
                return await asyncio.to_thread(self._tokenizer.encode_chat, messages)
            case "text":
                special = message.add_special_tokens if message.HasField("add_special_tokens") else True
                return await asyncio.to_thread(self._tokenizer.encode, message.text, special)
        raise InvalidRequest("prompt", None, "given: as text or messages")

    async def detokenize(self, message: generation_pb2.DetokenizeRequest) -> str:
        """Text of token ids. Raises `InvalidRequest`, `UnknownModel`, `NotReady`."""
        info = self._info()
        validate.check_model(message.model if message.HasField("model") else None, info)
        count = len(message.token_ids)
        if count > info.max_context_len:
            raise InvalidRequest("token_ids", f"{count} tokens", f"at most {info.max_context_len} tokens")
        tokens = checks.tokens("token_ids", message.token_ids, info)
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        return await asyncio.to_thread(self._tokenizer.decode, tokens, skip)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text."""
        return self._tokenizer.token_bytes(token)

    def model(self, name: str | None = None) -> ServedModel:
        """The served model. Raises `UnknownModel`, `NotReady`."""
        info = self._info()
        validate.check_model(name, info)
        return ServedModel(
            info.model,
            self._created,
            info.max_context_len,
            info.vocabulary_size,
            self._draft_method,
            info.is_lossless,
        )

    @property
    def is_lossless(self) -> bool:
        """Whether answers are what the model alone would have written; known once the engine is ready."""
        return self._engine.info.is_lossless

    def _info(self) -> TargetInfo:
        if not self._engine.ready:
            raise NotReady("the server is starting or draining")
        return self._engine.info

    @contextmanager
    def _named(self, request_id: RequestId) -> Iterator[None]:
        """Hold the request's name while it runs."""
        if request_id in self._running:
            raise InvalidRequest("request_id", request_id, "unlike those of running requests")
        self._running.add(request_id)
        try:
            yield
        finally:
            self._running.discard(request_id)

    async def _encode(self, prompt: Prompt, info: TargetInfo) -> tuple[int, ...]:
        """The prompt's tokens. What cannot possibly fit is refused without the work."""
        match prompt:
            case TokenPrompt(tokens):
                return tokens
            case TextPrompt(text):
                special = True
            case ChatPrompt(messages):
                text, special = self._tokenizer.render_chat(messages), False
        if len(text) > info.max_context_len * self._tokenizer.longest_token_chars:
            raise validate.too_long(prompt.field, len(text), "characters", info)
        return await asyncio.to_thread(self._tokenizer.encode, text, special)
