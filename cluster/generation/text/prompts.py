"""Prompts: their kinds, their checks before tokenization, and how they become tokens.

For an encoder-decoder model, what a request calls its prompt is the source, which the encoder reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cluster.core import bounds
from cluster.core.answer_format import TEXT_ONLY, AnswerFormat, ReasoningFormat
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import ContextLengthExceeded, InvalidRequest, context_reason
from cluster.core.json_text import WHOLE, find_half, is_deeper_than
from cluster.core.nearest import nearest
from cluster.core.verification import TargetInfo
from cluster.generation.text.chat_messages import CalledTool, Message
from cluster.generation.text.chat_template import OWN_VARIABLES, PLAIN, TemplateOptions, TextTooLong
from cluster.generation.text.tokenizer import Tokenizer
from pilotfish.v1 import generation_pb2

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_OPENING_TOKENS = 32
"""Most tokens of what opens or closes reasoning, and the white space after it."""
ALL_THAT_FITS = -1
"""`PromptOptions.truncate` that keeps as many tokens as the context and `max_tokens` allow."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is tokenized unchanged."""

    field: ClassVar[str] = "prompt"
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that are used unchanged."""

    field: ClassVar[str] = "prompt"
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the model's chat template renders."""

    field: ClassVar[str] = "messages"
    messages: tuple[Message, ...]
    options: TemplateOptions = PLAIN
    required_tool: str | None = None
    """The name of the tool that the answer calls, or `ANY_TOOL`; `None` does not constrain the answer."""
    single_call: bool = False
    """Whether the answer is one call, if a tool is required."""

    @property
    def chars(self) -> int:
        """Number of characters that a template may show: of messages, calls, tools and variables."""
        own = sum(map(len, self.options.tools)) + len(self.options.arguments)
        return own + sum(message.chars for message in self.messages)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How a prompt becomes tokens, and what is reported of it."""

    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens; `None`: to text, not to conversations."""
    truncate: int | None = None
    """Number of tokens to keep of a longer prompt, or `ALL_THAT_FITS`; `None` refuses a prompt that is too long."""
    keep_start: bool = False
    """Whether truncation keeps the first tokens instead of the last ones."""
    report: bool = False
    """Whether the tokens of the prompt are reported."""
    echo: bool = False
    """Whether the client gets the prompt in front of the answer."""

    def truncated(self, tokens: tuple[int, ...], max_tokens: int | None, info: TargetInfo) -> tuple[int, ...]:
        """Return the part of the prompt that is used, given the most tokens of the answer."""
        if self.truncate is None:
            return tokens
        room = info.max_source_len if info.is_encoder_decoder else max(1, info.max_context_len - (max_tokens or 1))
        most = room if self.truncate == ALL_THAT_FITS else self.truncate
        return tokens[:most] if self.keep_start else tokens[-most:]


def decode_prompt(request: generation_pb2.GenerateRequest, info: TargetInfo, limits: LimitsSection) -> Prompt:
    """Check and convert a prompt. Raises `InvalidRequest` (`prompt…` or `messages…`)."""
    kind = request.WhichOneof("input")
    if kind == "chat":
        return decode_chat(request.chat, limits)
    if kind == "token_ids":
        ids, is_cut = request.token_ids.ids, request.prompt_options.HasField("truncate")
        if not ids:
            raise InvalidRequest("prompt", (), "of at least one token")
        if len(ids) > most_prompt_tokens(info) and not is_cut:
            raise prompt_too_long("prompt", len(ids), info)
        return TokenPrompt(bounds.tokens("prompt", ids, 1, bounds.MAX_TOKENS, info.vocabulary_size))
    if kind == "text":
        if not request.text:
            raise InvalidRequest("prompt", "", "of at least one character")
        return TextPrompt(request.text)
    raise InvalidRequest("prompt", None, "given: as text, tokens or messages")


def decode_prompt_options(message: generation_pb2.PromptOptions, info: TargetInfo) -> PromptOptions:
    """Check and convert the options of a prompt. Raises `InvalidRequest` (`truncate_prompt_tokens`)."""
    if message.echo and info.is_encoder_decoder:
        raise InvalidRequest("echo", True, "false: an encoder-decoder model does not continue the text that it reads")
    truncate = message.truncate if message.HasField("truncate") else None
    if truncate not in (None, ALL_THAT_FITS):
        most = info.max_source_len if info.is_encoder_decoder else info.max_context_len
        bounds.integer("truncate_prompt_tokens", truncate, 1, most)
    special = message.add_special_tokens if message.HasField("add_special_tokens") else None
    return PromptOptions(special, truncate, message.keep_start, message.report, message.echo)


def decode_chat(message: generation_pb2.ChatInput, limits: LimitsSection) -> ChatPrompt:
    """Check and convert a conversation. Raises `InvalidRequest` (`messages…`)."""
    bounds.count("messages", message.messages, 1, limits.max_messages, "messages")
    messages = tuple(_chat_message(f"messages[{position}]", entry) for position, entry in enumerate(message.messages))
    bounds.count("tools", message.tools, 0, bounds.MAX_TOOLS, "tools")
    for position, tool in enumerate(message.tools):
        _check_object(f"tools[{position}]", tool)
    if message.template_arguments:
        own = OWN_VARIABLES.intersection(_check_object("chat_template_kwargs", message.template_arguments))
        if own:
            raise InvalidRequest("chat_template_kwargs", min(own), "without the template's own variables")
    begins = message.add_generation_prompt if message.HasField("add_generation_prompt") else None
    if begins and message.continue_final_message:
        raise InvalidRequest("add_generation_prompt", True, "false or left out with continue_final_message")
    if begins is None:
        begins = not message.continue_final_message
    options = TemplateOptions(tuple(message.tools), message.template_arguments, message.continue_final_message, begins)
    required = None
    if message.HasField("required_tool"):
        required = bounds.text("tool_choice", message.required_tool, bounds.MAX_NAME_BYTES)
        if not message.tools:
            raise InvalidRequest("tool_choice", required, "left out unless there are tools")
    return ChatPrompt(messages, options, required, message.single_call)


def _check_object(field: str, text: str) -> dict[str, Any]:
    """Return a JSON object. Raises `InvalidRequest`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or is_deeper_than(value, bounds.MAX_JSON_DEPTH):
        raise InvalidRequest(field, text, f"a JSON object that is nested at most {bounds.MAX_JSON_DEPTH} levels deep")
    if find_half(value) is not None:
        raise InvalidRequest(field, text, WHOLE)
    return value


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's API. Templates may know others."""


def _chat_message(field: str, message: generation_pb2.ChatMessage) -> Message:
    if _ROLE.fullmatch(message.role) is None:
        raise InvalidRequest(f"{field}.role", message.role, "1 to 64 letters, digits, _ or -")
    meant = None if message.role in _ROLES else nearest(message.role, _ROLES)
    if meant is not None:
        raise InvalidRequest(f"{field}.role", message.role, f"{meant}, of which it is a misspelling")
    name = None
    if message.HasField("name"):
        name = bounds.text(f"{field}.name", message.name, bounds.MAX_SPEAKER_NAME_BYTES)
    call_id = None
    if message.HasField("tool_call_id"):
        call_id = bounds.text(f"{field}.tool_call_id", message.tool_call_id, bounds.MAX_NAME_BYTES)
    # What an earlier answer called is shown to the model as it is, whether or not a tool could take it.
    calls = tuple(CalledTool(call.id, call.name, call.arguments) for call in message.tool_calls)
    reasoning = message.reasoning if message.HasField("reasoning") else None
    content, parts = message.content, tuple(message.content_parts)
    if parts and content:
        raise InvalidRequest(f"{field}.content", content, "left out where there are content_parts")
    return Message(message.role, content or "\n".join(parts), name, calls, call_id, reasoning, parts)


async def encode_prompt(
    tokenizer: Tokenizer, prompt: Prompt, options: PromptOptions, info: TargetInfo
) -> tuple[int, ...]:
    """Return the tokens of a prompt, computed in a thread.

    A text that cannot fit into the context, and is not truncated, is refused without tokenizing it. Raises
    `InvalidRequest` (`prompt` or `messages`), and `Overloaded` if too many long texts wait.
    """
    if isinstance(prompt, TokenPrompt):
        return prompt.tokens
    most_chars = None
    if options.truncate is None:
        most_chars = (most_prompt_tokens(info) + 1) * tokenizer.longest_token_chars
    chars = len(prompt.text) if isinstance(prompt, TextPrompt) else prompt.chars

    def least_tokens(count: int) -> int:
        return -(-count // tokenizer.longest_token_chars)

    if isinstance(prompt, TextPrompt) and most_chars is not None and chars > most_chars:
        raise prompt_too_long(prompt.field, least_tokens(chars), info, is_least=True)

    def encode() -> tuple[int, ...]:
        if isinstance(prompt, ChatPrompt):
            try:
                text, special = chat_text(tokenizer, prompt, info, most_chars)
            except TextTooLong as error:
                raise prompt_too_long(prompt.field, least_tokens(error.chars), info, is_least=True) from None
        else:
            text, special = prompt.text, True
        if most_chars is not None and len(text) > most_chars:
            raise prompt_too_long(prompt.field, least_tokens(len(text)), info, is_least=True)
        if options.add_special_tokens is not None:
            special = options.add_special_tokens
        return tokenizer.encode(text, special)

    return await tokenizer.texts.run(chars, encode)


def chat_text(
    tokenizer: Tokenizer, prompt: ChatPrompt, info: TargetInfo, most_chars: int | None = None
) -> tuple[str, bool]:
    """Return the text of a conversation, and whether the tokenizer adds its special tokens to it.

    An encoder-decoder model without a chat template reads the last message of the user. Raises `InvalidRequest`.
    """
    if tokenizer.has_template or not info.is_encoder_decoder:
        return tokenizer.render_chat(prompt.messages, prompt.options, most_chars), False
    for field, value in (
        ("tools", prompt.options.tools),
        ("chat_template_kwargs", prompt.options.arguments),
        ("continue_final_message", prompt.options.continue_final_message),
    ):
        if value:
            raise InvalidRequest(field, value, "left out: this model has no chat template")
    last = next((message for message in reversed(prompt.messages) if message.role == "user"), None)
    if last is None:
        roles = [message.role for message in prompt.messages]
        raise InvalidRequest("messages", roles, "with a message of the user: this model reads the last one of them")
    return last.content, True


def most_prompt_tokens(info: TargetInfo) -> int:
    """Return the most tokens of a prompt: the context without one token, or what the encoder reads."""
    return info.max_source_len if info.is_encoder_decoder else info.max_context_len - 1


def prompt_too_long(field: str, tokens: int, info: TargetInfo, *, is_least: bool = False) -> ContextLengthExceeded:
    """Return the error for a prompt that fills the whole context, or that is longer than the encoder reads.

    With `is_least`, the prompt has `tokens` tokens or more.
    """
    most = most_prompt_tokens(info)
    reason = context_reason(info.max_context_len)
    if info.is_encoder_decoder:
        reason = f"this model's maximum context length is {most} tokens, for the text that its encoder reads"
    return ContextLengthExceeded.of_prompt(field, tokens, most, reason, is_least=is_least)


async def encode_prediction(
    tokenizer: Tokenizer, prediction: str | tuple[int, ...], limits: LimitsSection
) -> tuple[int, ...]:
    """Return the tokens of a prediction. A text beyond the bound is refused without tokenizing it.

    Raises `InvalidRequest` (`prediction`).
    """
    if not isinstance(prediction, str):
        return prediction
    if not prediction:  # nearly every request; a thread would delay it
        return ()
    if len(prediction) > limits.max_prediction_tokens * tokenizer.longest_token_chars:
        raise prediction_too_long(len(prediction), "characters", limits)
    return await tokenizer.texts.run(len(prediction), tokenizer.encode_answer, prediction)


def prediction_too_long(length: int, unit: str, limits: LimitsSection) -> InvalidRequest:
    """Return the error for a prediction with too many tokens, or with too many characters for that many tokens."""
    return InvalidRequest("prediction", f"{length} {unit}", f"at most {limits.max_prediction_tokens} tokens")


def answer_format(tokenizer: Tokenizer, prompt: Prompt, tokens: Sequence[int]) -> AnswerFormat:
    """Return the format of the answers to a prompt with these tokens."""
    if not isinstance(prompt, ChatPrompt):
        return TEXT_ONLY
    calls, reasoning = tokenizer.call_format if prompt.options.tools else None, tokenizer.reasoning_format
    if reasoning is None or not reasoning.reasons:
        return AnswerFormat(calls, reasoning)
    if not prompt.options.continue_final_message:
        return AnswerFormat(calls, reasoning, begins_reasoning(tokenizer, reasoning, tokens))
    last = prompt.messages[-1]
    begun = last.content.lstrip()
    is_open = begun.startswith(reasoning.written_opening.rstrip()) if begun else reasoning.begins_inside
    return AnswerFormat(
        calls, reasoning, last.role == "assistant" and is_open and reasoning.closing not in last.content
    )


def begins_reasoning(tokenizer: Tokenizer, reasoning: ReasoningFormat, tokens: Sequence[int]) -> bool:
    """Return whether an answer to a prompt begins with what the model thinks, without a marker."""
    end = tokenizer.decode(tokens[-_LONGEST_OPENING_TOKENS:], skip_special_tokens=False).rstrip()
    if reasoning.begins_inside:
        return not end.endswith(reasoning.closing)
    return end.endswith(reasoning.written_opening.rstrip())
