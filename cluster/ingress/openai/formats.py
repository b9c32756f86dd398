"""The JSON formats in which the responses of OpenAI's two endpoints differ."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pilotfish.v1 import generation_pb2

Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One answer while it is received."""

    index: int
    counts_prompt: bool = True
    """Whether its usage includes the prompt. True for the first answer of each prompt."""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    received: int = 0
    """Number of tokens received."""
    drafted: int = 0
    """Draft tokens that were verified for them."""
    accepted: int = 0
    """Accepted draft tokens among them."""
    logprobs: list[Json] = field(default_factory=list)
    finished: generation_pb2.GenerationFinished | None = None
    is_started: bool = False
    """Whether a chunk was sent."""
    text_length: int = 0
    """Characters received so far, for text offsets."""
    utf8: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class EndpointFormat(Protocol):
    """The JSON format of one endpoint."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def logprobs(self, choice: Choice, delta: generation_pb2.GenerationDelta) -> list[Json]:
        """Return one log-probability entry per token of the delta."""
        ...

    def whole(self, choice: Choice, logprobs: Json | None) -> Json:
        """Return the content of a complete choice."""
        ...

    def chunk(self, text: str | None, first: bool) -> Json:
        """Return the content of a chunk's choice. `text` is `None` in the last chunk."""
        ...

    def join(self, entries: Sequence[Json]) -> Json:
        """Group log-probability entries as the endpoint does."""
        ...


class ChatFormat:
    """The format of `/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def logprobs(self, choice: Choice, delta: generation_pb2.GenerationDelta) -> list[Json]:  # noqa: ARG002
        """Return token, bytes and alternatives of each token."""
        return [
            {
                **_chat_token(own, entry.logprob),
                "top_logprobs": [_chat_token(top.token_bytes, top.logprob) for top in entry.top],
            }
            for entry, own in zip(delta.logprobs, delta.token_bytes, strict=True)
        ]

    def whole(self, choice: Choice, logprobs: Json | None) -> Json:
        """Return a message."""
        return {"message": {"role": "assistant", "content": "".join(choice.texts)}, "logprobs": logprobs}

    def chunk(self, text: str | None, first: bool) -> Json:
        """Return a delta. The first one has the role."""
        role = {"role": "assistant"} if first else {}
        content = {} if text is None and not first else {"content": text or ""}
        return {"delta": {**role, **content}}

    def join(self, entries: Sequence[Json]) -> Json:
        """Return the entries as a list."""
        return {"content": list(entries), "refusal": None}


class CompletionFormat:
    """The format of `/v1/completions`."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def logprobs(self, choice: Choice, delta: generation_pb2.GenerationDelta) -> list[Json]:
        """Return token, offset in the answer's text and alternatives by their text, for each token."""
        entries = []
        for entry, own in zip(delta.logprobs, delta.token_bytes, strict=True):
            token = _token_text(own)
            tops = {_token_text(top.token_bytes): _finite(top.logprob) for top in entry.top}
            entries.append(
                {
                    "tokens": token,
                    "token_logprobs": _finite(entry.logprob),
                    "top_logprobs": {token: _finite(entry.logprob)} | tops,
                    "text_offset": choice.text_length,
                }
            )
            choice.text_length += len(choice.utf8.decode(own))
        return entries

    def whole(self, choice: Choice, logprobs: Json | None) -> Json:
        """Return a text."""
        return {"text": "".join(choice.texts), "logprobs": logprobs}

    def chunk(self, text: str | None, first: bool) -> Json:  # noqa: ARG002
        """Return a part of the text."""
        return {"text": text or ""}

    def join(self, entries: Sequence[Json]) -> Json:
        """Return one list per field."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry[name] for entry in entries] for name in names}


def _chat_token(text: bytes, logprob: float) -> Json:
    return {"token": _token_text(text), "logprob": _finite(logprob), "bytes": list(text)}


def _token_text(text: bytes) -> str:
    """Return a token as text, or its bytes in hexadecimal if it is only part of a character."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _finite(logprob: float) -> float:
    """Replace minus infinity, which JSON lacks, by -9999 as OpenAI's API does."""
    return max(logprob, -9999.0)
