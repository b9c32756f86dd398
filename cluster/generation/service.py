"""The generation service behind both APIs: validate, tokenize, generate, detokenize."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from cluster.coordinator.coordinator import Coordinator
from cluster.core import bounds
from cluster.core.config.draft_section import LearnsFrom
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest, NotReady
from cluster.core.ids import RequestId, check_request_id, scoped_request_id
from cluster.core.request import Commit, FinishReason, GenerationRequest, Usage
from cluster.core.verification import TargetInfo
from cluster.generation import validate
from cluster.generation.events import Event, ServedModel, Started
from cluster.generation.grammar.constraints import Constraints
from cluster.generation.prompt_log import PromptLog
from cluster.generation.recent_answers import RecentAnswers
from cluster.generation.request_events import RequestEvents
from cluster.generation.text.bad_words import without_bad_words
from cluster.generation.text.prompts import (
    ChatPrompt,
    answer_format,
    chat_text,
    decode_chat,
    encode_prediction,
    encode_prompt,
)
from cluster.generation.text.thinking import with_bounded_thinking
from cluster.generation.text.tokenizer import Tokenizer
from cluster.generation.validate import ValidatedRequest
from pilotfish.v1 import generation_pb2

_TAKE_OVER_SECONDS = 5.0
"""Longest wait for the end of an earlier call of a resumed request, in seconds."""
_ABORT_AGAIN_SECONDS = 0.05
"""Time after which an earlier call that has not ended is aborted again, in seconds."""

_NamesModel = generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest | generation_pb2.DetokenizeRequest


@dataclass(slots=True, eq=False)
class _Running:
    """A call that answers a request."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False
    """Whether the engine was asked."""
    is_aborted: bool = False
    """Whether it was aborted before."""


async def _aborted(request: GenerationRequest) -> AsyncGenerator[Commit, None]:
    """Yield the ends of the answers of a request that was aborted before it reached the engine."""
    for index in request.open_answers:
        known = len(request.resumed[index].tokens) if request.resumed else 0
        usage = Usage(len(request.input), known, resumed_tokens=known)
        yield Commit((), 0, finish=FinishReason.ABORT, usage=usage, index=index)


class GenerationService:
    """Answers requests with one engine and one tokenizer."""

    def __init__(
        self,
        engine: Coordinator,
        tokenizer: Tokenizer,
        limits: LimitsSection,
        *,
        draft_method: str = "none",
        aliases: Sequence[str] = (),
        shares_between_keys: bool = False,
        learns_from: LearnsFrom = "none",
        prompt_log: PromptLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        created: float | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits
        self.draft_method = draft_method
        """The name of the drafting method."""
        self._aliases = tuple(aliases)
        self._shares_between_keys = shares_between_keys
        self._learns_from = learns_from
        self._prompt_log = prompt_log
        self._clock = clock
        self._created = int(time.time() if created is None else created)
        self._running: dict[RequestId, _Running] = {}
        self._claims: dict[RequestId, object] = {}
        """The newest call that waits to resume each request."""
        self._recent = RecentAnswers()
        self._constraints = Constraints(tokenizer)

    async def generate(
        self, message: generation_pb2.GenerateRequest, seconds_left: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield `Started`, then for each answer a `Delta` per commit and `Finished`.

        A resumed request yields what follows the tokens that its caller has. The first event follows the first commit,
        so a refused request yields nothing. Closing the iterator frees the memory of all answers. Raises
        `InvalidRequest`, `UnknownModel`, `NotReady`, `Overloaded`, `DeadlineExceeded`, `TargetUnavailable`.
        """
        info = self._info()
        self._resolve_alias(message)
        most_seconds = self._limits.max_timeout_seconds
        deadline = self._clock() + (most_seconds if seconds_left is None else min(seconds_left, most_seconds))
        ends = info.eos_token_ids or self._tokenizer.eos_token_ids
        valid = validate.validate(
            message,
            info,
            self._limits,
            ends,
            shares_between_keys=self._shares_between_keys,
            learns_from=self._learns_from,
        )
        async with self._reserved(valid.scoped_id, take_over=bool(valid.received)) as running:
            request, started = await self._tokenized(valid, info)
            request = replace(request, deadline=deadline)
            events = RequestEvents(valid, request, started, self._tokenizer, self._engine, self._recent)
            unlogged = self._log_for(message, valid, info)
            if not events.have_ended():
                running.has_begun = True
                generate = _aborted if running.is_aborted else self._engine.generate
                async with aclosing(generate(events.request)) as commits:
                    async for commit in commits:
                        if unlogged is not None:  # the request was not refused
                            unlogged.add(valid.prompt)
                            unlogged = None
                        for event in events.take(commit):
                            yield event
                        if events.have_ended():
                            break  # close the engine's stream before the client reads the last event
            for event in events.rest():
                yield event

    def _log_for(
        self, message: generation_pb2.GenerateRequest, valid: ValidatedRequest, info: TargetInfo
    ) -> PromptLog | None:
        """Return the log for the prompt of a request; `None` if nobody allows it, or it goes on with an answer."""
        log = self._prompt_log
        if log is None or valid.received or info.is_encoder_decoder:
            return None
        return log if validate.allows_learning(message, log.learn_from) else None

    async def _tokenized(self, valid: ValidatedRequest, info: TargetInfo) -> tuple[GenerationRequest, Started]:
        """Return the request to the engine and its first event. Raises `InvalidRequest`, `Overloaded`."""
        self._engine.check_room(valid.client, valid.scoped_id, valid.answers.engine_n, valid.priority)
        prompt = await encode_prompt(self._tokenizer, valid.prompt, valid.prompt_options, info)
        prompt = valid.prompt_options.truncated(prompt, valid.max_tokens, info)
        prediction = await encode_prediction(self._tokenizer, valid.prediction, self._limits)
        longest = self._engine.longest_sequence(len(prompt) if info.is_encoder_decoder else 0)
        request = validate.fit_to_context(valid, prompt, prediction, info, self._limits, longest)
        request = without_bad_words(request, self._tokenizer, valid.bad_words)
        form, is_chat = answer_format(self._tokenizer, valid.prompt, prompt), isinstance(valid.prompt, ChatPrompt)
        request = await self._constraints.apply(request, valid, form)
        request = with_bounded_thinking(request, self._tokenizer, form if is_chat else None)
        text = replace(
            request.text,
            kept_special_ids=tuple(sorted(self._tokenizer.special_tokens_in(form.markers).values())),
            reasoning=form.reasoning if form.reasons else None,
            begins_in_reasoning=form.begins_in_reasoning,
        )
        request = replace(request, text=text)
        started = Started(
            valid.request_id,
            info.model,
            request.sampling.seed,
            prompt_tokens=len(prompt),
            prompt=prompt if valid.prompt_options.report else (),
            answer_format=form,
            fingerprint=info.fingerprint,
        )
        return request, started

    def abort(self, request_id: str, client: str = "") -> bool:
        """End the answers of a running request of `client` with `ABORT`. Raises `InvalidRequest` (`request_id`)."""
        return self._abort(scoped_request_id(client, check_request_id(request_id)))

    def _abort(self, request_id: RequestId) -> bool:
        """Abort a request. One that has not reached the engine never does."""
        running = self._running.get(request_id)
        if running is None or running.has_begun:
            return self._engine.abort(request_id)
        running.is_aborted = True
        return True

    async def tokenize(self, message: generation_pb2.TokenizeRequest) -> tuple[int, ...]:
        """Return the token ids of a text or a conversation. Raises `InvalidRequest`, `UnknownModel`, `NotReady`."""
        info = self._info()
        self._resolve_alias(message)
        validate.check_model(message.model if message.HasField("model") else None, info)
        texts = self._tokenizer.texts
        match message.WhichOneof("input"):
            case "chat":
                chat = decode_chat(message.chat, self._limits)
                text, special = await texts.run(chat.chars, chat_text, self._tokenizer, chat, info)
            case "text":
                text, special = message.text, True
            case _:
                raise InvalidRequest("prompt", None, "given: as text or messages")
        if message.HasField("add_special_tokens"):
            special = message.add_special_tokens
        return await texts.run(len(text), self._tokenizer.encode, text, special)

    async def detokenize(self, message: generation_pb2.DetokenizeRequest) -> str:
        """Return the text of token ids. Raises `InvalidRequest`, `UnknownModel`, `NotReady`."""
        info = self._info()
        self._resolve_alias(message)
        validate.check_model(message.model if message.HasField("model") else None, info)
        most = max(info.max_context_len, info.max_source_len)
        tokens = bounds.tokens("token_ids", message.token_ids, 0, most, info.vocabulary_size)
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        return await self._tokenizer.texts.run(len(tokens), self._tokenizer.decode, tokens, skip)

    def token_piece(self, token: int) -> str:
        """Return the entry of the vocabulary for a token, as the tokenizer spells it; empty for an unused id."""
        return self._tokenizer.token_piece(token)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token adds to a text."""
        return self._tokenizer.token_bytes(token)

    def model(self, name: str | None = None) -> ServedModel:
        """Return the served model. Raises `UnknownModel`, `NotReady`."""
        info = self._info()
        if name not in self._aliases:
            validate.check_model(name, info)
        return ServedModel(
            info.model if name is None else name,
            info.model,
            self._created,
            info.max_context_len,
            info.vocabulary_size,
            self.draft_method,
            info.is_lossless,
            info.max_source_len,
            self._shares_between_keys,
            info.dequantized_from,
        )

    def models(self) -> tuple[ServedModel, ...]:
        """Return the served model under each of its names. Raises `NotReady`."""
        return (self.model(), *map(self.model, self._aliases))

    def _resolve_alias(self, message: _NamesModel) -> None:
        if message.model in self._aliases:
            message.ClearField("model")

    @property
    def is_lossless(self) -> bool:
        """Whether answers are exactly those of the model alone. Available once the engine is ready."""
        return self._engine.info.is_lossless

    def _info(self) -> TargetInfo:
        if not self._engine.ready:
            raise NotReady("the server is starting or draining")
        return self._engine.info

    @asynccontextmanager
    async def _reserved(self, request_id: RequestId, *, take_over: bool) -> AsyncIterator[_Running]:
        """Reserve the id of a request while it runs. `take_over` ends the request that runs with it."""
        if take_over:
            await self._end_earlier(request_id)
        if request_id in self._running:
            raise InvalidRequest("request_id", request_id, "unlike those of running requests")
        running = self._running[request_id] = _Running()
        try:
            yield running
        finally:
            del self._running[request_id]
            running.ended.set()

    async def _end_earlier(self, request_id: RequestId) -> None:
        """End the earlier calls of a resumed request that still run. Raises `NotReady` if they do not end.

        Of calls that wait here, only the newest goes on: the others raise `InvalidRequest`, so that nobody retries
        them.
        """
        claim = self._claims[request_id] = object()
        try:
            async with asyncio.timeout(_TAKE_OVER_SECONDS):
                while self._claims.get(request_id) is claim and (running := self._running.get(request_id)) is not None:
                    self._abort(request_id)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ABORT_AGAIN_SECONDS):
                            await running.ended.wait()
            if self._claims.get(request_id) is not claim:
                raise InvalidRequest("request_id", request_id, "resumed by one call at a time; a later one goes on")
        except TimeoutError:
            raise NotReady(f"the earlier call of {request_id} has not ended yet") from None
        finally:
            if self._claims.get(request_id) is claim:
                del self._claims[request_id]
