"""The JSON formats in which the responses of OpenAI's two endpoints differ."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from cluster.core.answer_format import AnswerFormat
from cluster.core.answer_format_rows import call_format, reasoning_format
from cluster.core.errors import InvalidRequest, NotReady
from cluster.ingress.openai.fields.tools import required_tool
from cluster.ingress.openai.parsing.answer_parser import ALL_CALLS, AnswerParser
from cluster.ingress.openai.parsing.call_reader import CallOptions
from cluster.ingress.openai.parsing.parts import Json
from cluster.ingress.openai.requests import ChatRequest
from cluster.wire.codec.answer_format import decode_call_format, decode_reasoning_format
from pilotfish.v1 import common_pb2, generation_pb2

_MOST_ID_CHARS = 32
"""Most characters of a request's id in the ids of calls."""


@dataclass(slots=True)
class Choice:
    """One answer while it is received."""

    index: int
    counts_prompt: bool = True
    """Whether its usage includes the prompt. True for the first answer of each prompt."""
    prompt_text: str = ""
    """The prompt as the client sent it, if it is echoed; empty if it sent no text, or one that is truncated."""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    received: int = 0
    """Number of tokens received."""
    drafted: int = 0
    """Draft tokens that were verified for them."""
    accepted: int = 0
    """Accepted draft tokens among them."""
    origins: common_pb2.OriginCounts = field(default_factory=common_pb2.OriginCounts)
    """Where the accepted draft tokens come from."""
    acceptances: list[tuple[int, int]] = field(default_factory=list)
    """The drafted and the accepted tokens of each step with a draft."""
    logprobs: list[Json] = field(default_factory=list)
    drafts: Json = field(default_factory=dict)
    """What is reported of the verified drafts, if the client wants it."""
    finished: generation_pb2.GenerationFinished | None = None
    is_started: bool = False
    """Whether a chunk was sent."""
    parser: AnswerParser | None = None
    """Separates reasoning and calls of tools from the content, if the answer may have them."""
    prompt_tokens: int = 0
    prompt_token_ids: list[int] | None = None
    """The tokens of the prompt, if the client wants them."""
    prompt_logprobs: list[Any] | None = None
    """The log-probabilities of the prompt, if the client wants them."""
    echo: str = ""
    """The text of the prompt, if the client wants it before the answer and does not have it yet."""
    echo_logprobs: list[Json] = field(default_factory=list)
    """The log-probabilities of the tokens of `echo`, if requested."""
    text_length: int = 0
    """Characters received so far, for text offsets. Those of a prompt's tokens that an echo leaves out precede it."""
    utf8: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    @property
    def is_stopped(self) -> bool:
        """Whether a stop, or the model's end of sequence, has ended the answer."""
        return self.finished is not None and self.finished.reason == generation_pb2.FINISH_REASON_STOP


def reported_prompt(choice: Choice) -> Json:
    """Return what a whole response reports of the prompt of a choice. What the client did not ask for is null."""
    return {"prompt_token_ids": choice.prompt_token_ids, "prompt_logprobs": choice.prompt_logprobs}


def streamed_prompt(choice: Choice) -> Json:
    """Return what the first chunk of a choice reports of its prompt: what the client asked for."""
    return {name: value for name, value in reported_prompt(choice).items() if value is not None}


class EndpointFormat(Protocol):
    """The JSON format of one endpoint."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    reports_prompt_per_choice: bool
    """Whether each choice reports its prompt. Otherwise the response does, which has one prompt."""

    def logprobs(self, choice: Choice, delta: generation_pb2.GenerationDelta) -> list[Json]:
        """Return one log-probability entry per token of the delta."""

    def prompt_logprobs(self, choice: Choice, started: generation_pb2.GenerationStarted) -> list[Json]:
        """Return one log-probability entry per token of the prompt, for an answer that begins with its prompt."""

    def begin(self, choice: Choice, started: generation_pb2.GenerationStarted) -> None:
        """Prepare a choice when its request starts."""

    def whole(self, choice: Choice, logprobs: Json | None) -> Json:
        """Return the content of a complete choice."""

    def chunk(self, choice: Choice, text: str | None) -> tuple[Json, bool]:
        """Return the content of a chunk's choice, and whether there is any. `text` is `None` in the last chunk."""

    def join(self, entries: Sequence[Json]) -> Json:
        """Group log-probability entries as the endpoint does."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How log-probabilities name tokens."""

    are_ids: bool = False
    """`token_id:N` instead of the text."""

    def name(self, token: int, text: bytes) -> str:
        """Return the name of a token with this id and these bytes."""
        return f"token_id:{token}" if self.are_ids else token_text(text)


class ChatFormat:
    """The format of `/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    reports_prompt_per_choice = False

    def __init__(
        self,
        names: TokenNames = TokenNames(),
        calls: CallOptions = ALL_CALLS,
        *,
        include_reasoning: bool = True,
        lists_own: bool = False,
    ) -> None:
        """`lists_own`: the alternatives of a token include the token itself, as where the client names the others."""
        self._names = names
        self._calls = calls
        self._include_reasoning = include_reasoning
        self._lists_own = lists_own

    @classmethod
    def of(cls, body: ChatRequest) -> ChatFormat:
        """Return the format of the answers to a chat."""
        return cls(
            TokenNames(body.return_tokens_as_token_ids),
            CallOptions(
                tools={tool["function"]["name"]: _parameters(tool["function"]) for tool in body.tools},
                parallel=body.parallel_tool_calls,
                forced=required_tool(body) is not None,
                whole=bool(body.stop or body.stop_token_ids),
            ),
            include_reasoning=body.include_reasoning,
            lists_own=bool(body.logprob_token_ids),
        )

    def begin(self, choice: Choice, started: generation_pb2.GenerationStarted) -> None:
        """Parse the answer if it may have reasoning or calls of tools."""
        if not started.tool_format and not started.reasoning_format:
            return
        prefix = f"call_{_short(started.request_id)}_{choice.index}_"
        form = _answer_format(started)
        choice.parser = AnswerParser(prefix, form, self._calls, include_reasoning=self._include_reasoning)

    def logprobs(self, choice: Choice, delta: generation_pb2.GenerationDelta) -> list[Json]:  # noqa: ARG002
        """Return token, bytes and alternatives of each token."""
        return [self._scored(entry, own) for entry, own in zip(delta.logprobs, delta.token_bytes, strict=True)]

    def _scored(self, entry: common_pb2.TokenLogprobs, text: bytes) -> Json:
        own = self._token(entry.token_id, text, entry.logprob)
        tops = [self._token(top.token_id, top.token_bytes, top.logprob) for top in entry.top]
        if self._lists_own and entry.token_id not in (top.token_id for top in entry.top):
            tops = sorted([*tops, own], key=lambda token: -token["logprob"])
        return {**own, "top_logprobs": tops}

    def prompt_logprobs(self, choice: Choice, started: generation_pb2.GenerationStarted) -> list[Json]:  # noqa: ARG002
        """Return nothing: a chat never begins with its prompt."""
        return []

    def whole(self, choice: Choice, logprobs: Json | None) -> Json:
        """Return a message."""
        text = "".join(choice.texts)
        content = {"content": text} if choice.parser is None else choice.parser.message(text, stopped=choice.is_stopped)
        # vLLM's clients read both names of what the model thinks.
        message = {"role": "assistant", "content": None, "reasoning_content": None, "reasoning": None, **content}
        return {"message": message, "logprobs": logprobs}

    def chunk(self, choice: Choice, text: str | None) -> tuple[Json, bool]:
        """Return a delta. The first one has the role."""
        is_plain = choice.parser is None
        if choice.parser is None:
            found: Json = {"content": text} if text else {}
        elif text is None:
            found = choice.parser.last_delta(stopped=choice.is_stopped)
        else:
            found = choice.parser.delta(text)
        role = {} if choice.is_started else {"role": "assistant"}
        empty = {"content": ""} if not found and (role or (is_plain and text is not None)) else {}
        return {"delta": {**role, **empty, **found}}, bool(found)

    def join(self, entries: Sequence[Json]) -> Json:
        """Return the entries as a list."""
        return {"content": list(entries), "refusal": None}

    def _token(self, token: int, text: bytes, logprob: float) -> Json:
        return {"token": self._names.name(token, text), "logprob": finite(logprob), "bytes": list(text)}


class CompletionFormat:
    """The format of `/v1/completions`."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    reports_prompt_per_choice = True

    def __init__(self, names: TokenNames = TokenNames()) -> None:
        self._names = names

    def begin(self, choice: Choice, started: generation_pb2.GenerationStarted) -> None:
        """Do nothing: a completion is text only."""

    def logprobs(self, choice: Choice, delta: generation_pb2.GenerationDelta) -> list[Json]:
        """Return token, offset in the answer's text and alternatives by their text, for each token."""
        tokens = zip(delta.logprobs, delta.token_bytes, strict=True)
        return [self._entry(choice, entry.token_id, own, entry) for entry, own in tokens]

    def prompt_logprobs(self, choice: Choice, started: generation_pb2.GenerationStarted) -> list[Json]:
        """Return one entry per token of the prompt. The first token has no log-probability."""
        tokens = zip(started.prompt_token_ids, started.prompt_token_bytes, prompt_scores(started), strict=True)
        return [self._entry(choice, token, own, score) for token, own, score in tokens]

    def _entry(self, choice: Choice, token: int, own: bytes, score: common_pb2.TokenLogprobs | None) -> Json:
        name, offset = self._names.name(token, own), max(0, choice.text_length)
        choice.text_length += len(choice.utf8.decode(own))
        if score is None:
            return {"tokens": name, "token_logprobs": None, "top_logprobs": None, "text_offset": offset}
        tops = {self._names.name(top.token_id, top.token_bytes): finite(top.logprob) for top in score.top}
        return {
            "tokens": name,
            "token_logprobs": finite(score.logprob),
            "top_logprobs": {name: finite(score.logprob)} | tops,
            "text_offset": offset,
        }

    def whole(self, choice: Choice, logprobs: Json | None) -> Json:
        """Return a text."""
        return {"text": "".join(choice.texts), "logprobs": logprobs}

    def chunk(self, choice: Choice, text: str | None) -> tuple[Json, bool]:  # noqa: ARG002
        """Return a part of the text."""
        return {"text": text or ""}, bool(text)

    def join(self, entries: Sequence[Json]) -> Json:
        """Return one list per field."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry[name] for entry in entries] for name in names}


def _answer_format(started: generation_pb2.GenerationStarted) -> AnswerFormat:
    """Return the formats that a coordinator names, or describes. Raises `NotReady` if its description is invalid."""
    calls, reasoning = call_format(started.tool_format), reasoning_format(started.reasoning_format)
    try:
        if started.HasField("own_call_format"):
            calls = decode_call_format(started.own_call_format)
        if started.HasField("own_reasoning_format"):
            reasoning = decode_reasoning_format(started.own_reasoning_format)
    except InvalidRequest as error:
        raise NotReady(f"the coordinator describes its answers wrongly: {error}") from None
    return AnswerFormat(calls, reasoning, started.begins_in_reasoning)


def _short(request_id: str) -> str:
    """Return the id of a request with at most 32 characters; different ones for different ids."""
    if len(request_id) <= _MOST_ID_CHARS:
        return request_id
    return blake2b(request_id.encode(), digest_size=_MOST_ID_CHARS // 2).hexdigest()


def _parameters(function: Json) -> Json:
    """Return the schema of a tool's arguments; an empty one if there is none."""
    found = function.get("parameters")
    return found if isinstance(found, dict) else {}


def prompt_scores(started: generation_pb2.GenerationStarted) -> list[common_pb2.TokenLogprobs | None]:
    """Return what was requested of each token of the prompt: nothing of the first one.

    Nothing of any token of a request that was aborted before its prompt was computed.
    """
    if not started.prompt_logprobs:
        return [None] * len(started.prompt_token_ids)
    return [None, *started.prompt_logprobs]


def token_text(text: bytes) -> str:
    """Return a token as text, or its bytes in hexadecimal if it is only part of a character."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def finite(logprob: float) -> float:
    """Replace minus infinity, which JSON lacks, by -9999 as OpenAI's API does."""
    return max(logprob, -9999.0)
