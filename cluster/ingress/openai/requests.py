"""The requests of OpenAI's API, as far as they are served: what is not is refused by name, never ignored.

Here types and names are checked; bounds are the validator's business, so that both doors speak with one voice.
Explicit nulls count as left out.
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from cluster.core.errors import InvalidRequest, UnsupportedParameter
from cluster.ingress.openai.unsupported import CHAT, COMPLETIONS, Neutral

_LONGEST_NAME_SHOWN = 64


def _encodable(text: str) -> str:
    """JSON can smuggle half a surrogate pair into a string; UTF-8 and protobuf cannot hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("surrogate", "valid Unicode, without half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class FirstErrorOnly(FailFast):
    """A list is read up to its first error: errors about each of a million entries would not fit in memory."""

    __hash__ = object.__hash__  # unions of annotated types are compared by hash


Texts = Annotated[list[Text], FirstErrorOnly()]
Integers = Annotated[list[int], FirstErrorOnly()]


class Schema(BaseModel):
    """Strict types, no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Schema):
    """What a stream carries beside the answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class Speculation(Schema):
    """What a request says of drafts; the text is the same either way."""

    enabled: bool | None = None
    max_draft_tokens: int | None = None


class Parameters(Schema):
    """What both endpoints take. Bounds: see `cluster.ingress.validate`."""

    not_served: ClassVar[Neutral] = {}

    model: Text | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    """Answers to choose the `n` best from; with beam search its beams."""
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: Literal[True, False, "never"] = False
    stop: Texts = []
    user: Text | None = None
    """Taken and not used."""
    metadata: dict[Text, Text] = {}
    """Taken and not used."""
    request_id: Text | None = None
    """Names the request for `Abort`; unlike those that run."""
    cache_salt: Text | None = None
    """Only requests of one salt share stored keys and values."""
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    stop_token_ids: Integers = []
    max_draft_tokens: int | None = None
    """Most guesses that may be checked at once; 0 turns speculation off."""
    speculation: Speculation | None = None
    """The same, in a form of its own."""
    return_token_ids: bool = False
    """Report each chunk's tokens, and how many of them a drafter wrote first."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Parameters):
    """`POST /v1/completions`."""

    not_served: ClassVar[Neutral] = COMPLETIONS

    prompt: (
        Annotated[list[Text], FirstErrorOnly()]
        | Annotated[list[Annotated[list[int], FirstErrorOnly()]], FirstErrorOnly()]
    )
    """One or several prompts, all text or all tokens."""
    logprobs: int | None = None
    """Alternatives per token."""
    max_tokens: int | None = 16
    """OpenAI's default for this endpoint."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _several_prompts(cls, value: object) -> object:
        return _prompts(value)


class ChatTurn(Schema):
    """One message."""

    role: Text
    content: Text
    name: Text | None = None


class ChatRequest(Parameters):
    """`POST /v1/chat/completions`."""

    not_served: ClassVar[Neutral] = CHAT

    messages: Annotated[list[ChatTurn], FirstErrorOnly()]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_cache_key: Text | None = None
    """Taken and not used."""
    safety_identifier: Text | None = None
    """Taken and not used."""

    @field_validator("messages", mode="before")
    @classmethod
    def _plain_turns(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        return [_plain_turn(f"messages[{position}]", turn) for position, turn in enumerate(value)]


_Request = TypeVar("_Request", bound=Parameters)


def parse(schema: type[_Request], body: bytes) -> _Request:
    """A request from its body.

    Raises `InvalidRequest` (`body` when it is no JSON object), `UnsupportedParameter`.
    """
    given = {name: value for name, value in _read_object(body).items() if value is not None}
    for name, neutral in schema.not_served.items():
        if name in given:
            _refuse_unless_neutral(name, given.pop(name), neutral)
    for name in given:
        if name not in schema.model_fields:
            raise _unknown(name, (*schema.model_fields, *schema.not_served))
    try:
        request = schema.model_validate(given)
    except ValidationError as error:
        raise _explain(error) from None
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", given["stream_options"], "left out unless stream is true")
    return request


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", body[error.start : error.start + 1], f"UTF-8; byte {error.start} is not") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InvalidRequest("body", body, f"JSON: {reason}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body", value, "a JSON object")
    return value


def _refuse_unless_neutral(name: str, value: object, neutral: tuple[object, ...]) -> None:
    if any(type(value) is type(harmless) and value == harmless for harmless in neutral):
        return
    if not neutral:
        raise UnsupportedParameter(name, value)
    raise UnsupportedParameter(name, value, f"{json.dumps(neutral[0])} or left out: nothing else is supported")


def _unknown(name: str, known: tuple[str, ...]) -> InvalidRequest:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    shown = name[:_LONGEST_NAME_SHOWN]
    return InvalidRequest(shown, shown, f"a known parameter; the nearest is {nearest}")


def _explain(error: ValidationError) -> InvalidRequest:
    """The first thing pydantic found, in the words of every other refusal."""
    part = error.errors(include_url=False)[0]
    field = _path(part["loc"])
    if part["type"] == "missing":
        return InvalidRequest(field, None, "given")
    if part["type"] == "extra_forbidden":
        return InvalidRequest(field, part["input"], "left out: it is not a known field")
    return InvalidRequest(field, part["input"], part["msg"].removeprefix("Input should be "))


def _path(steps: tuple[int | str, ...]) -> str:
    """`("messages", 2, "role")` as `messages[2].role`; a branch of a union (`list[str]`) is no step."""
    path = ""
    for step in steps:
        if isinstance(step, str) and "[" in step:
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")[:_LONGEST_NAME_SHOWN]


def _prompts(value: object) -> object:
    """Any of the four forms as a list of prompts. Raises `InvalidRequest` (`prompt…`)."""
    if isinstance(value, str):
        return [value]
    if value == []:
        raise InvalidRequest("prompt", value, "of at least one token")
    if isinstance(value, list):
        if all(type(entry) is str for entry in value):
            return value
        if all(type(entry) is int for entry in value):
            return [value]
        if all(type(entry) is list and all(type(token) is int for token in entry) for entry in value):
            return value
    raise InvalidRequest("prompt", value, "a string, token ids, or a list of either")


def _plain_turn(field: str, turn: object) -> object:
    """A message without its nulls, its text parts joined. Raises `InvalidRequest`."""
    if not isinstance(turn, dict):
        return turn
    given = {name: value for name, value in turn.items() if value is not None}
    for name in ("audio", "function_call", "refusal", "tool_call_id", "tool_calls"):
        if given.pop(name, []) != []:
            raise UnsupportedParameter(f"{field}.{name}", turn[name])
    if given.pop("annotations", []) != []:
        raise UnsupportedParameter(f"{field}.annotations", turn["annotations"])
    if isinstance(given.get("content"), list):
        parts = given["content"]
        given["content"] = "\n".join(
            _part_text(f"{field}.content[{position}]", part) for position, part in enumerate(parts)
        )
    return given


def _part_text(field: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise UnsupportedParameter(f"{field}.type", kind, "text: no other part is supported")
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", text, "a valid string")
    return text
