"""The answers of OpenAI's API: two shapes of choice over the same events, whole or in chunks."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pilotfish.v1 import generation_pb2

Json = dict[str, Any]

_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(slots=True)
class Choice:
    """One answer as it arrives."""

    index: int
    leads: bool = True
    """Whether it is the first of its prompt's, whose cost includes the prompt."""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    accepted: int = 0
    logprobs: list[Json] = field(default_factory=list)
    finished: generation_pb2.GenerationFinished | None = None
    begun: bool = False
    """Whether a chunk of it was sent."""
    text_length: int = 0
    """Characters that its tokens came to so far, for text offsets."""
    utf8: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class Shape(Protocol):
    """What differs between the endpoints."""

    prefix: str
    whole_object: str
    chunk_object: str

    def logprobs(self, choice: Choice, delta: generation_pb2.GenerationDelta) -> list[Json]:
        """One entry per token of the delta."""
        ...

    def whole(self, choice: Choice, logprobs: Json | None) -> Json:
        """The content of a whole choice."""
        ...

    def piece(self, text: str | None, first: bool) -> Json:
        """The content of a chunk's choice; `None` for the one that ends it."""
        ...

    def join(self, entries: Sequence[Json]) -> Json:
        """Entries as the API groups them."""
        ...


class ChatShape:
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def logprobs(self, choice: Choice, delta: generation_pb2.GenerationDelta) -> list[Json]:  # noqa: ARG002
        """Token, bytes, alternatives."""
        return [
            {
                **_chat_token(own, entry.logprob),
                "top_logprobs": [_chat_token(top.token_bytes, top.logprob) for top in entry.top],
            }
            for entry, own in zip(delta.logprobs, delta.token_bytes, strict=True)
        ]

    def whole(self, choice: Choice, logprobs: Json | None) -> Json:
        """A message."""
        return {"message": {"role": "assistant", "content": "".join(choice.texts)}, "logprobs": logprobs}

    def piece(self, text: str | None, first: bool) -> Json:
        """A delta; the first says whose turn it is."""
        role = {"role": "assistant"} if first else {}
        content = {} if text is None and not first else {"content": text or ""}
        return {"delta": {**role, **content}}

    def join(self, entries: Sequence[Json]) -> Json:
        """A list."""
        return {"content": list(entries), "refusal": None}


class CompletionShape:
    """`/v1/completions`."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def logprobs(self, choice: Choice, delta: generation_pb2.GenerationDelta) -> list[Json]:
        """Token, offset in the answer's text, alternatives by their text."""
        entries = []
        for entry, own in zip(delta.logprobs, delta.token_bytes, strict=True):
            token = _shown(own)
            tops = {_shown(top.token_bytes): _finite(top.logprob) for top in entry.top}
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
        """A text."""
        return {"text": "".join(choice.texts), "logprobs": logprobs}

    def piece(self, text: str | None, first: bool) -> Json:  # noqa: ARG002
        """A piece of text."""
        return {"text": text or ""}

    def join(self, entries: Sequence[Json]) -> Json:
        """A list per field."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry[name] for entry in entries] for name in names}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk and every whole answer of one request says about it."""

    shape: Shape
    id: str
    created: int
    model: str
    seed: int
    fingerprint: str
    is_lossless: bool
    """Whether the answer is what the model alone would have written."""

    def wrap(self, choices: list[Json], *, chunk: bool, **more: Json | None) -> Json:
        """The outer object."""
        return {
            "id": self.id,
            "object": self.shape.chunk_object if chunk else self.shape.whole_object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "seed": self.seed,
            "system_fingerprint": self.fingerprint,
            "lossless": self.is_lossless,
            **more,
        }


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the client asked to see."""

    logprobs: bool
    token_ids: bool
    usage: bool = False
    """A last chunk with the usage."""


def take_delta(shape: Shape, choice: Choice, delta: generation_pb2.GenerationDelta) -> list[Json]:
    """Add a delta to a whole choice; returns its log-probability entries."""
    entries = shape.logprobs(choice, delta)
    choice.texts.append(delta.text)
    choice.token_ids.extend(delta.token_ids)
    choice.accepted += delta.accepted_draft_tokens
    choice.logprobs.extend(entries)
    return entries


def whole_choice(shape: Shape, choice: Choice, wishes: Wishes) -> Json:
    """A finished choice."""
    return {
        "index": choice.index,
        **shape.whole(choice, shape.join(choice.logprobs) if wishes.logprobs else None),
        **_ending(choice.finished),
        **_tokens(choice.token_ids, choice.accepted, wishes),
    }


def delta_choice(shape: Shape, choice: Choice, delta: generation_pb2.GenerationDelta, wishes: Wishes) -> Json | None:
    """A chunk's choice, or `None` when the delta holds nothing that the client would see."""
    entries = shape.logprobs(choice, delta)
    if not delta.text and not wishes.token_ids and not entries:
        return None
    first, choice.begun = not choice.begun, True
    return {
        "index": choice.index,
        **shape.piece(delta.text, first),
        "logprobs": shape.join(entries) if wishes.logprobs else None,
        "finish_reason": None,
        **_tokens(delta.token_ids, delta.accepted_draft_tokens, wishes),
    }


def last_choice(shape: Shape, choice: Choice) -> Json:
    """The chunk's choice that ends it."""
    first, choice.begun = not choice.begun, True
    return {"index": choice.index, **shape.piece(None, first), "logprobs": None, **_ending(choice.finished)}


def usage(choices: Iterable[Choice]) -> Json:
    """The cost of all choices together; a prompt counts once, however many answers it has."""
    ended = [(choice.leads, choice.finished.usage) for choice in choices if choice.finished is not None]
    parts = [part for _, part in ended]
    prompt = sum(part.prompt_tokens for leads, part in ended if leads)
    completion = sum(part.completion_tokens for part in parts)
    accepted = sum(part.accepted_draft_tokens for part in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(part.drafted_tokens for part in parts) - accepted,
        },
    }


def model_card(model: generation_pb2.Model) -> Json:
    """One entry of `/v1/models`."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "pilotfish",
        "max_model_len": model.max_context_len,
        "lossless": not model.lossy,
    }


def _ending(finished: generation_pb2.GenerationFinished | None) -> Json:
    if finished is None:
        return {"finish_reason": None}
    stop: str | int | None = None
    if finished.HasField("stop_string"):
        stop = finished.stop_string
    elif finished.HasField("stop_token_id"):
        stop = finished.stop_token_id
    return {"finish_reason": _REASONS[finished.reason], "stop_reason": stop}


def _tokens(token_ids: Iterable[int], accepted: int, wishes: Wishes) -> Json:
    return {"token_ids": list(token_ids), "accepted_draft_tokens": accepted} if wishes.token_ids else {}


def _chat_token(text: bytes, logprob: float) -> Json:
    return {"token": _shown(text), "logprob": _finite(logprob), "bytes": list(text)}


def _shown(text: bytes) -> str:
    """A token as text; one that is only part of a character as its bytes."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _finite(logprob: float) -> float:
    """JSON has no infinity; the API says -9999 for the impossible."""
    return max(logprob, -9999.0)
