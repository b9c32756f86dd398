"""The requests of OpenAI's API, with vLLM's additions.

This module checks types and names. Bounds are checked by `cluster.generation.validate`, so that both APIs share them.
Explicit nulls count as left out. Unsupported parameters are refused by name.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from cluster.core import bounds
from cluster.core.errors import InvalidRequest, UnsupportedParameter
from cluster.core.grammar import Grammar
from cluster.ingress.openai.fields.grammars import GrammarParameters
from cluster.ingress.openai.fields.tools import ChatExtensions, ToolCall, required_tool
from cluster.ingress.openai.fields.types import (
    IN_VOCABULARY,
    MAX_UINT32,
    FirstErrorOnly,
    StrictModel,
    Text,
    Texts,
    UInt32,
    without_nulls,
)
from cluster.ingress.openai.fields.unsupported import CHAT, COMPLETIONS, UnsupportedParameters
from cluster.ingress.openai.fields.vllm_parameters import VllmParameters

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of the parts of a message that are texts. `refusal` is what an assistant says instead of an answer."""


class StreamOptions(StrictModel):
    """What a stream reports beside the answer."""

    path: ClassVar[str] = "stream_options."

    include_usage: bool = False
    """End the stream with a chunk that has the usage."""
    include_obfuscation: Literal[False] = False
    """Only `false`: chunks are not padded."""
    continuous_usage_stats: bool = False
    """If `include_usage` is set: whether every chunk of a stream has the usage so far, or only the last one."""


class Speculation(StrictModel):
    """How a request uses speculation. The text does not depend on it."""

    path: ClassVar[str] = "speculation."

    enabled: bool | None = None
    """Whether drafts are verified."""
    max_draft_tokens: UInt32 | None = None
    """Most draft tokens that are verified at once."""


class Prediction(StrictModel):
    """The answer that a client expects, as text or as text parts, which are joined without a separator."""

    path: ClassVar[str] = "prediction."

    type: Literal["content"]
    content: Text

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        return "".join(part_text(f"prediction.content[{position}]", part) for position, part in enumerate(value))


class Parameters(GrammarParameters, VllmParameters):
    """The parameters of both endpoints."""

    model: Text | None = None
    """A served name of the model; unset: the model that is served."""
    stream: bool = False
    """Send server-sent events while the answer is generated. Each has an id with which the stream can be resumed,
    unless the response has more than 192 choices."""
    stream_options: StreamOptions | None = None
    """`include_usage` and `continuous_usage_stats`, with `stream`."""
    max_tokens: UInt32 | None = None
    """Most tokens of the answer; unset: the rest of the context."""
    temperature: float | None = None
    """Logits are divided by it, a number from 0 to 1,000,000; 0 takes the most probable token. Default 1; of
    encoder-decoder models 0."""
    top_p: float | None = None
    """Keep the smallest set of most probable tokens whose probability reaches it."""
    presence_penalty: float | None = None
    """Subtracted once from the logits of tokens seen in the answer."""
    frequency_penalty: float | None = None
    """Subtracted from the logits of tokens once per occurrence in the answer."""
    logit_bias: dict[str, float] = Field(default_factory=dict)
    """Added to the logits of tokens, which are named by id."""
    n: UInt32 | None = None
    """Number of answers to each prompt. The seed of answer `i` to a prompt is the prompt's seed plus `i`."""
    best_of: UInt32 | None = None
    """Number of answers to generate. The `n` best are returned. With beam search, the number of beams."""
    stop: Texts = Field(default_factory=list)
    """Strings that end the answer, also across tokens."""
    store: Literal[False] | None = None
    """`false`: the texts are neither learned from nor stored, even if the API key allows it. Only `false`."""
    user: Text | None = None
    """No effect: a name that the client chooses for its user."""
    metadata: dict[Text, Text] = Field(default_factory=dict)
    """No effect: labels that the client chooses."""
    max_draft_tokens: UInt32 | None = None
    """Most draft tokens that are verified at once; 0 turns speculation off."""
    speculation: Speculation | None = None
    """Turns speculation on or off, or bounds its draft tokens as `max_draft_tokens` does."""
    return_drafts: bool = False
    """Report the draft tree of every verdict with the origin of each node, and the text that each token completed. The
    receipt of an answer counts its accepted draft tokens by origin (`accepted_by_origin`): `request`, `earlier`
    (answers), `trained` (drafts) and `forced` (by a grammar)."""
    prediction: Prediction | None = None
    """The answer that the client expects. Drafts may be taken from it; the text does not depend on it."""

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
                if not isinstance(entry, str):
                    return {key: entry}
        return value

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def every_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


class CompletionRequest(Parameters):
    """The body of `POST /v1/completions`."""

    unsupported: ClassVar[UnsupportedParameters] = COMPLETIONS

    prompt: Texts | Annotated[list[Annotated[list[int], FirstErrorOnly()]], FirstErrorOnly()]
    """One or several prompts, all texts or all token ids."""
    echo: bool = False
    """Begin each text with its prompt. With `logprobs`, the prompt's tokens have log-probabilities too. Refused by
    encoder-decoder models."""
    logprobs: UInt32 | None = None
    """Alternatives per token."""
    max_tokens: UInt32 | None = 16
    """Most tokens of the answer; unset: 16, or what the context allows. 0 with `echo` sends the prompt only."""

    @property
    def only_echoes(self) -> bool:
        """Whether the response has the prompt and no answer."""
        return self.echo and self.max_tokens == 0

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list_of_prompts(cls, value: object) -> object:
        return _list_of_prompts(value)


class ChatTurn(StrictModel):
    """One message of a conversation."""

    path: ClassVar[str] = "messages."

    role: Text
    content: Text | list[Text]
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], FirstErrorOnly()] = Field(default_factory=list)
    """Calls of tools by the assistant."""
    tool_call_id: Text | None = None
    """The call that a message of a tool answers."""
    reasoning_content: Text | None = None
    """What the assistant thought before the content. Templates may leave it out."""


class ChatRequest(ChatExtensions, Parameters):
    """The body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[UnsupportedParameters] = CHAT

    messages: Annotated[list[ChatTurn], FirstErrorOnly()]
    """The conversation: texts, or lists of text parts. The model's own template renders it. Calls of tools in earlier
    messages are shown to the model as they are, also if their arguments are no JSON object."""
    max_completion_tokens: UInt32 | None = None
    """Most tokens of the answer; the newer name of `max_tokens`."""
    logprobs: bool = False
    """Report the log-probability of each token of the answer."""
    top_logprobs: UInt32 | None = None
    """Number of alternatives reported for each token of the answer, if `logprobs` is set."""
    prompt_cache_key: Text | None = None
    """No effect: the prefix cache finds equal beginnings by content."""
    safety_identifier: Text | None = None
    """No effect: a name that the client chooses for its user."""

    @field_validator("messages", mode="before")
    @classmethod
    def _as_plain_messages(cls, value: object) -> object:
        return plain_messages(value)

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Fields without effect. The form of a text is among them where the answer must be a call of a tool."""
        return (*super().ignored_fields, *(("response_format",) if self._ignores_form else ()))

    @property
    def _ignores_form(self) -> bool:
        return self.response_format is not None and required_tool(self) is not None

    def requested_grammar(self) -> tuple[str, Grammar] | None:
        """Return what constrains the answer, without the form of a text where the answer is a call of a tool."""
        if not self._ignores_form:
            return super().requested_grammar()
        return self.model_copy(update={"response_format": None}).requested_grammar()


def plain_messages(value: object) -> object:
    """Drop the nulls of messages, and take the texts of their parts. Raises `InvalidRequest` (`messages…`)."""
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
            for index, prompt in enumerate(prompts):
                _check_tokens("prompt" if prompts is not value else f"prompt[{index}]", prompt)
            return prompts
    raise InvalidRequest("prompt", value, "a string, token ids, or a list of either")


def _check_tokens(field: str, tokens: list[int]) -> None:
    """Raise `InvalidRequest` for a token that the model cannot have, whatever its vocabulary is."""
    bounds.count(field, tokens, 0, bounds.MAX_MESSAGE_BYTES)
    for position, token in enumerate(tokens):
        if not 0 <= token <= MAX_UINT32:
            raise InvalidRequest(f"{field}[{position}]", token, IN_VOCABULARY)


def _plain_message(field: str, message: object) -> object:
    """Drop nulls, take the texts of parts, and what other servers' answers have. Raises `InvalidRequest`."""
    if not isinstance(message, dict):
        return message
    present = {name: value for name, value in message.items() if value is not None}
    if "audio" in present:
        raise UnsupportedParameter(f"{field}.audio", message["audio"])
    present.pop("annotations", None)
    if "reasoning" in present:  # vLLM's name of it
        present.setdefault("reasoning_content", present.pop("reasoning"))
    if "function_call" in present:  # the form of calls before there were tools
        present.setdefault("tool_calls", [{"function": present.pop("function_call")}])
    refusal = present.pop("refusal", "")
    if present.get("role") == "assistant":
        present["content"] = present.get("content") or refusal
    if isinstance(present.get("content"), list):
        parts = present["content"]
        present["content"] = [part_text(f"{field}.content[{position}]", part) for position, part in enumerate(parts)]
    return present


def part_text(field: str, part: object) -> str:
    """Return the text of a part of a message: a plain text, or an object with a text. Raises `InvalidRequest`."""
    if isinstance(part, str):
        return part
    fields = without_nulls(part) if isinstance(part, dict) else {}
    kind = fields.get("type", "text")
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise UnsupportedParameter(f"{field}.type", kind, "text: no other part is supported")
    name = "refusal" if kind == "refusal" else "text"
    text = fields.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.{name}", text, "a valid string")
    return text


def _check_token_key(field: str, key: str) -> None:
    """Check that a key is a token id. It is a string, because JSON objects have no other keys."""
    if not (key.isascii() and key.isdecimal()) or len(key) > len(str(MAX_UINT32)) or int(key) > MAX_UINT32:
        raise InvalidRequest(field, key, IN_VOCABULARY)
