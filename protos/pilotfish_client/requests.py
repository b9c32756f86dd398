"""What a client asks: a prompt and its parameters, as a message of the public service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish.v1 import generation_pb2
from pilotfish_client.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    """`system`, `user`, `assistant` or another role that the model's template knows."""
    content: str


Prompt = str | Sequence[int] | Sequence[Message] | generation_pb2.GenerateRequest
"""A text, token ids, a conversation, or a whole request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How answers are generated. `None` takes the server's default, which the schema names."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    """0 always takes the most probable token."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    """Added logits, by token."""
    seed: int | None = None
    """Unset: the client draws one. `Started.seed` reports it."""
    logprobs: int | None = None
    """Alternatives to report per token."""
    thinking_token_budget: int | None = None
    """Most tokens that the model thinks before it answers."""
    stop: str | Sequence[str] = ()
    """A string, or several, that end the answer."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    n: int | None = None
    """Number of answers."""
    best_of: int | None = None
    cache_salt: str | None = None
    store: bool | None = None
    """`False`: the server trains no draft on prompt and answer, also if the API key allows it."""
    max_draft_tokens: int | None = None
    """Most draft tokens that are verified at once; 0 turns speculation off."""
    priority: int | None = None
    """Requests with a lower priority start earlier, if the server's policy is `priority`."""
    prediction: str | None = None
    """The answer that is expected. Drafts may be taken from it."""
    request_id: str | None = None
    """Unset: the client draws one."""


DEFAULT_PARAMETERS = Parameters()
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
_REQUEST = ("model", "n", "best_of", "cache_salt", "store", "max_draft_tokens", "priority", "request_id")


def make_request(prompt: Prompt, parameters: Parameters) -> generation_pb2.GenerateRequest:
    """The message that asks for the answers. What `parameters` set replaces what a whole request has.

    Raises `InvalidRequest` for an empty prompt, and for values that the schema cannot hold.
    """
    request = generation_pb2.GenerateRequest()
    try:
        set_prompt(request, prompt)
        for names, message in (
            (_REQUEST, request),
            (_SAMPLING, request.sampling),
            (_STOPPING, request.stopping),
        ):
            for name in names:
                _set(message, name, getattr(parameters, name))
        if parameters.thinking_token_budget is not None:
            request.sampling.thinking.max_tokens = parameters.thinking_token_budget
        if parameters.logit_bias:
            del request.sampling.logit_bias[:]
            for token, bias in parameters.logit_bias.items():
                request.sampling.logit_bias.add(token_id=token, bias=bias)
        if parameters.stop:
            request.stopping.stop[:] = [parameters.stop] if isinstance(parameters.stop, str) else parameters.stop
        if parameters.stop_token_ids:
            request.stopping.stop_token_ids[:] = parameters.stop_token_ids
        _set(request, "prediction_text", parameters.prediction)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the parameters do not fit the schema: {error}") from error
    return request


def set_prompt(message: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, prompt: Prompt) -> None:
    """Write a prompt into a message. Raises `InvalidRequest` for an empty one, `TypeError` for other values."""
    if isinstance(prompt, generation_pb2.GenerateRequest) and isinstance(message, generation_pb2.GenerateRequest):
        message.MergeFrom(prompt)
    elif isinstance(prompt, generation_pb2.GenerateRequest):
        raise TypeError("prompt: needed a text or messages, found a whole request")
    elif isinstance(prompt, str):
        message.text = prompt
    elif not prompt:
        raise InvalidRequest("prompt: it is empty", "prompt", "a text, token ids or messages")
    elif isinstance(prompt[0], Message):
        for entry in prompt:
            if not isinstance(entry, Message):
                raise TypeError(f"prompt: needed messages alone, found {entry!r}")
            message.chat.messages.add(role=entry.role, content=entry.content)
    elif isinstance(message, generation_pb2.GenerateRequest):
        tokens: Sequence[Any] = prompt  # protobuf refuses what is no token
        message.token_ids.ids.extend(tokens)
    else:
        raise TypeError("prompt: needed a text or messages, found token ids")


def _set(message: Any, name: str, value: object) -> None:
    if value is not None:
        setattr(message, name, value)
