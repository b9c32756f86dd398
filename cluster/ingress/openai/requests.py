"""The requests of OpenAI's API, with vLLM's additions.

This module checks types and names. Bounds are checked by `cluster.ingress.validate`, so that both APIs share them.
Explicit nulls count as left out. Unsupported and unknown parameters are refused by name.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from cluster.core import bounds
from cluster.core.errors import InvalidRequest, UnsupportedParameter
from cluster.ingress.openai.unsupported import CHAT, COMPLETIONS, IgnoredValues

_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64 - 1


def _encodable(text: str) -> str:
    """Refuse half of a surrogate pair: JSON can hold it, UTF-8 and protobuf cannot."""
    if not _is_encodable(text):
        raise PydanticCustomError("surrogate", "valid Unicode, without half of a surrogate pair")
    return text


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class FirstErrorOnly(FailFast):
    """Stop reading a list at its first error. The errors of a million entries would not fit in memory."""

    __hash__ = object.__hash__  # unions of annotated types are compared by hash


Text = Annotated[str, AfterValidator(_encodable)]
UInt32 = Annotated[int, Field(ge=0, le=_MAX_UINT32)]
UInt64 = Annotated[int, Field(ge=0, le=_MAX_UINT64)]
Texts = Annotated[list[Text], FirstErrorOnly()]
UInt32s = Annotated[list[UInt32], FirstErrorOnly()]


class StrictModel(BaseModel):
    """A model with strict types and no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown_field_only(cls, value: object) -> object:
        """Keep one unknown field, to report it. The errors of a million fields would not fit in memory."""
        if not isinstance(value, dict):
            return value
        known = {name: entry for name, entry in value.items() if name in cls.model_fields}
        unknown = next((name for name in value if name not in cls.model_fields), None)
        return known if unknown is None else {**known, unknown: value[unknown]}


class StreamOptions(StrictModel):
    """What a stream reports beside the answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class Speculation(StrictModel):
    """How a request uses speculation. The text does not depend on it."""

    enabled: bool | None = None
    max_draft_tokens: UInt32 | None = None


class Prediction(StrictModel):
    """The answer that a client expects, as text or as text parts, which are joined without a separator."""

    type: Literal["content"]
    content: Text

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        return "".join(_part_text(f"prediction.content[{position}]", part) for position, part in enumerate(value))


class Parameters(StrictModel):
    """The parameters of both endpoints."""

    unsupported: ClassVar[IgnoredValues] = {}

    model: Text | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    seed: UInt64 | None = None
    n: UInt32 | None = None
    best_of: UInt32 | None = None
    """Number of answers to generate. The `n` best are returned. With beam search, the number of beams."""
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: Literal[True, False, "never"] = False
    stop: Texts = []
    user: Text | None = None
    """A name that the client chooses for its user; it has no effect."""
    metadata: dict[Text, Text] = {}
    """Labels that the client chooses; they have no effect."""
    request_id: Text | None = None
    """Names the request for `Abort`. Running requests have distinct names."""
    cache_salt: Text | None = None
    """Only requests with the same salt share prefix-cache blocks."""
    top_k: Annotated[int, Field(ge=-1, le=_MAX_UINT32)] | None = None
    """0 and, as in vLLM, -1 keep all tokens."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    min_tokens: UInt32 | None = None
    """Fewest tokens of the answer; nothing ends it before."""
    stop_token_ids: UInt32s = []
    max_draft_tokens: UInt32 | None = None
    """Most draft tokens that are verified at once; 0 turns speculation off."""
    speculation: Speculation | None = None
    """Turns speculation on or off, or bounds its draft tokens as `max_draft_tokens` does."""
    prediction: Prediction | None = None
    """The answer that the client expects. Drafts may be taken from it; the text does not depend on it."""
    return_token_ids: bool = False
    """Report the token ids of each chunk, and how many of them are accepted draft tokens."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_bias_tokens(cls, value: object) -> object:
        if isinstance(value, dict):
            bounds.count("logit_bias", value, 0, bounds.MAX_LOGIT_BIAS)
            for key in value:
                _check_token_key("logit_bias", key)
        return value

    @field_validator("metadata", mode="before")
    @classmethod
    def _first_wrong_metadata_only(cls, value: object) -> object:
        """Keep one wrong entry, to report it."""
        if isinstance(value, dict):
            for key, entry in value.items():
                if not (isinstance(entry, str) and _is_encodable(key) and _is_encodable(entry)):
                    return {key: entry}
        return value

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Parameters):
    """The body of `POST /v1/completions`."""

    unsupported: ClassVar[IgnoredValues] = COMPLETIONS

    prompt: Texts | Annotated[list[Annotated[list[int], FirstErrorOnly()]], FirstErrorOnly()]
    """One or several prompts, all texts or all token ids."""
    logprobs: UInt32 | None = None
    """Alternatives per token."""
    max_tokens: UInt32 | None = 16
    """OpenAI's default for this endpoint."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list_of_prompts(cls, value: object) -> object:
        return _list_of_prompts(value)


class ChatTurn(StrictModel):
    """One message of a conversation."""

    role: Text
    content: Text
    name: Text | None = None


class ChatRequest(Parameters):
    """The body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[IgnoredValues] = CHAT

    messages: Annotated[list[ChatTurn], FirstErrorOnly()]
    max_completion_tokens: UInt32 | None = None
    logprobs: bool = False
    top_logprobs: UInt32 | None = None
    prompt_cache_key: Text | None = None
    """OpenAI's routing hint; it has no effect, because the prefix cache finds equal beginnings by content."""
    safety_identifier: Text | None = None
    """A name that the client chooses for its user; it has no effect."""

    @field_validator("messages", mode="before")
    @classmethod
    def _as_plain_messages(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        return [_plain_message(f"messages[{position}]", message) for position, message in enumerate(value)]


def _list_of_prompts(value: object) -> object:
    """Convert any of the four forms of `prompt` to a list of prompts. Raises `InvalidRequest` (`prompt…`)."""
    if isinstance(value, str):
        return [value]
    if value == []:
        raise InvalidRequest("prompt", value, "of at least one token")
    if isinstance(value, list):
        if all(type(entry) is str for entry in value):
            return value
        prompts = [value] if all(type(entry) is int for entry in value) else value
        if all(type(prompt) is list and all(type(token) is int for token in prompt) for prompt in prompts):
            for prompt in prompts:
                bounds.tokens("prompt", prompt, 0, bounds.MAX_MESSAGE_BYTES, _MAX_UINT32 + 1)
            return prompts
    raise InvalidRequest("prompt", value, "a string, token ids, or a list of either")


def _plain_message(field: str, message: object) -> object:
    """Drop nulls and join text parts. Raises `InvalidRequest`."""
    if not isinstance(message, dict):
        return message
    present = {name: value for name, value in message.items() if value is not None}
    for name in ("audio", "function_call", "refusal", "tool_call_id", "tool_calls", "annotations"):
        if present.pop(name, []) != []:
            raise UnsupportedParameter(f"{field}.{name}", message[name])
    if isinstance(present.get("content"), list):
        parts = present["content"]
        present["content"] = "\n".join(
            _part_text(f"{field}.content[{position}]", part) for position, part in enumerate(parts)
        )
    return present


def _part_text(field: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise UnsupportedParameter(f"{field}.type", kind, "text: no other part is supported")
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", text, "a valid string")
    return text


def _check_token_key(field: str, key: str) -> None:
    """Check that a key is a token id. It is a string, because JSON objects have no other keys."""
    if not (key.isascii() and key.isdecimal()) or len(key) > len(str(_MAX_UINT32)) or int(key) > _MAX_UINT32:
        raise InvalidRequest(field, key, "a token id of the model's vocabulary")
