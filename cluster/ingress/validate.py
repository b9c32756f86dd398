"""The one validator: a request as it came over gRPC becomes one that may be trusted, or a precise error.

Fields are named as OpenAI's API names them, and whatever door a request came in by, it gets the same words.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cluster.core.bounds import MAX_TREE_NODES
from cluster.core.config import LimitsSection
from cluster.core.errors import InvalidRequest, UnknownModel
from cluster.core.ids import RequestId
from cluster.core.request import GenerationRequest, SamplingParameters, StoppingCriteria
from cluster.core.verification import TargetInfo
from cluster.ingress.answer_count import Plurality, plurality
from cluster.ingress.checks import bad_token, integer, number, text, tokens
from cluster.ingress.text.chat_template import Message
from pilotfish.v1 import common_pb2, generation_pb2

MAX_TOP_K = 2**20
MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
_SEED_BITS = 53  # what a JSON number holds exactly in every language, so that a seed told can be sent again
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_MAX_SALT_BYTES = 256
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_NAME_BYTES = 64


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, tokenized as it stands."""

    field: ClassVar[str] = "prompt"
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Tokens, taken as they are."""

    field: ClassVar[str] = "prompt"
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered by the model's template."""

    field: ClassVar[str] = "messages"
    messages: tuple[Message, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """All that can be said of a request before its prompt is tokenized."""

    request_id: RequestId
    prompt: Prompt
    sampling: SamplingParameters
    stopping: StoppingCriteria
    """`max_tokens` holds only once `admit` has seen the prompt's length."""
    max_tokens: int | None
    plurality: Plurality
    cache_salt: str
    max_draft_tokens: int | None


def validate(
    request: generation_pb2.GenerateRequest, info: TargetInfo, limits: LimitsSection, eos_token_ids: Sequence[int]
) -> ValidatedRequest:
    """Check every value that does not depend on the prompt's length in tokens.

    Raises `InvalidRequest` with field, value and bound; `UnknownModel`.
    """
    check_model(request.model if request.HasField("model") else None, info)
    request_id = _request_id(request)
    prompt = _prompt(request, info, limits)
    sampling = _sampling(request.sampling, info, limits)
    stopping = _stopping(request.stopping, info, limits, eos_token_ids)
    return ValidatedRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        stopping=stopping,
        max_tokens=integer("max_tokens", request.stopping.max_tokens, 1, limits.max_output_tokens)
        if request.stopping.HasField("max_tokens")
        else None,
        plurality=plurality(request, sampling, stopping, info, limits),
        cache_salt=text("cache_salt", request.cache_salt, _MAX_SALT_BYTES),
        max_draft_tokens=draft_tokens("max_draft_tokens", request.max_draft_tokens)
        if request.HasField("max_draft_tokens")
        else None,
    )


def admit(
    request: ValidatedRequest, prompt: tuple[int, ...], info: TargetInfo, limits: LimitsSection, deadline: float
) -> GenerationRequest:
    """Check prompt and answer against the context, and settle `max_tokens`. Raises `InvalidRequest`."""
    context = info.max_context_len
    if not prompt:
        raise InvalidRequest(request.prompt.field, (), "of at least one token")
    if len(prompt) >= context:
        raise too_long(request.prompt.field, len(prompt), "tokens", info)
    room = context - len(prompt)
    wanted = request.max_tokens
    if wanted is None:
        # What the client did not ask for must not be what it is refused for: the KV pool may hold less than a context.
        pool = info.layout.longest(info.kv.blocks_total, context, context) or context
        wanted = max(1, min(room, pool - len(prompt), limits.max_output_tokens))
    if wanted > room:
        raise InvalidRequest(
            "max_tokens",
            wanted,
            f"at most {room}: the context holds {context} tokens and the prompt takes {len(prompt)}",
        )
    return GenerationRequest(
        request_id=request.request_id,
        prompt=prompt,
        sampling=request.plurality.measured(request.sampling),
        stopping=replace(request.stopping, max_tokens=wanted),
        deadline=deadline,
        cache_salt=request.cache_salt,
        n=request.plurality.asked,
        beam=request.plurality.beam,
        max_draft_tokens=request.max_draft_tokens,
    )


def too_long(field: str, length: int, unit: str, info: TargetInfo) -> InvalidRequest:
    """The error for a prompt that leaves no room for an answer."""
    most = info.max_context_len - 1
    return InvalidRequest(
        field,
        f"{length} {unit}",
        f"at most {most} tokens: the context holds {info.max_context_len}, one of them the answer's",
    )


def check_model(name: str | None, info: TargetInfo) -> None:
    """Unset is the only model. Raises `UnknownModel`."""
    if name is not None and name != info.model:
        raise UnknownModel("model", name, f"a served model: {info.model}")


def draft_tokens(field: str, value: int) -> int:
    """Most nodes of a tree of guesses, 0 for none. Raises `InvalidRequest`."""
    return integer(field, value, 0, MAX_TREE_NODES)


def draw_seed() -> int:
    """A seed for a request that brings none; random, because answers must not be guessable."""
    return secrets.randbits(_SEED_BITS)


def is_request_id(text: str) -> bool:
    """Whether a client may name its request so."""
    return _REQUEST_ID.fullmatch(text) is not None


def check_request_id(text: str) -> RequestId:
    """Raises `InvalidRequest` (`request_id`)."""
    if not is_request_id(text):
        raise InvalidRequest("request_id", text, "1 to 64 letters, digits or ._:-")
    return RequestId(text)


def chat(message: generation_pb2.ChatInput, limits: LimitsSection) -> tuple[Message, ...]:
    """A conversation. Raises `InvalidRequest` (`messages…`)."""
    if not 1 <= len(message.messages) <= limits.max_messages:
        raise InvalidRequest("messages", f"{len(message.messages)} messages", f"1 to {limits.max_messages} messages")
    return tuple(_turn(f"messages[{position}]", turn) for position, turn in enumerate(message.messages))


def _turn(field: str, turn: generation_pb2.ChatMessage) -> Message:
    if _ROLE.fullmatch(turn.role) is None:
        raise InvalidRequest(f"{field}.role", turn.role, "1 to 64 letters, digits, _ or -")
    name = turn.name if turn.HasField("name") else None
    if name is not None and len(name.encode()) > _MAX_NAME_BYTES:
        raise InvalidRequest(f"{field}.name", name, f"at most {_MAX_NAME_BYTES} bytes")
    return Message(turn.role, turn.content, name)


def _request_id(request: generation_pb2.GenerateRequest) -> RequestId:
    if request.HasField("request_id"):
        return check_request_id(request.request_id)
    return RequestId(secrets.token_hex(16))


def _prompt(request: generation_pb2.GenerateRequest, info: TargetInfo, limits: LimitsSection) -> Prompt:
    kind = request.WhichOneof("input")
    if kind == "chat":
        return ChatPrompt(chat(request.chat, limits))
    if kind == "token_ids":
        if not request.token_ids.ids:
            raise InvalidRequest("prompt", (), "of at least one token")
        if len(request.token_ids.ids) >= info.max_context_len:
            raise too_long("prompt", len(request.token_ids.ids), "tokens", info)
        return TokenPrompt(tokens("prompt", request.token_ids.ids, info))
    if kind == "text":
        if not request.text:
            raise InvalidRequest("prompt", "", "of at least one character")
        return TextPrompt(request.text)
    raise InvalidRequest("prompt", None, "given: as text, tokens or messages")


def _sampling(message: common_pb2.SamplingParameters, info: TargetInfo, limits: LimitsSection) -> SamplingParameters:
    default = SamplingParameters()

    def real(field: str, low: float, high: float, *, above: bool = False) -> float:
        value = getattr(message if message.HasField(field) else default, field)  # type: ignore[arg-type]
        return number(field, value, low, high, above=above)

    return SamplingParameters(
        temperature=real("temperature", 0, MAX_TEMPERATURE),
        top_k=integer("top_k", message.top_k, 0, MAX_TOP_K),
        top_p=real("top_p", 0, 1, above=True),
        min_p=real("min_p", 0, 1),
        repetition_penalty=real("repetition_penalty", 0, MAX_PENALTY, above=True),
        presence_penalty=real("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=real("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_logit_bias(message, info, limits),
        seed=message.seed if message.HasField("seed") else draw_seed(),
        logprobs=integer("logprobs", message.logprobs, 0, limits.max_logprobs)
        if message.HasField("logprobs")
        else None,
    )


def _logit_bias(
    message: common_pb2.SamplingParameters, info: TargetInfo, limits: LimitsSection
) -> tuple[tuple[int, float], ...]:
    count = len(message.logit_bias)
    if count > limits.max_logit_bias:
        raise InvalidRequest("logit_bias", f"{count} tokens", f"at most {limits.max_logit_bias} tokens")
    shifts: dict[int, float] = {}
    for entry in message.logit_bias:
        if entry.token_id >= info.vocabulary_size:
            raise bad_token("logit_bias", entry.token_id, info.vocabulary_size)
        if entry.token_id in shifts:
            raise InvalidRequest("logit_bias", entry.token_id, "each token at most once")
        shifts[entry.token_id] = number(f"logit_bias[{entry.token_id}]", entry.bias, -MAX_BIAS, MAX_BIAS)
    return tuple(shifts.items())


def _stopping(
    message: generation_pb2.StoppingCriteria,
    info: TargetInfo,
    limits: LimitsSection,
    eos_token_ids: Sequence[int],
) -> StoppingCriteria:
    if len(message.stop) > limits.max_stop_strings:
        raise InvalidRequest("stop", f"{len(message.stop)} strings", f"at most {limits.max_stop_strings} strings")
    for stop in message.stop:
        if not 1 <= len(stop) <= limits.max_stop_string_chars:
            raise InvalidRequest("stop", stop, f"of 1 to {limits.max_stop_string_chars} characters")
    count = len(message.stop_token_ids)
    if count > limits.max_stop_token_ids:
        raise InvalidRequest("stop_token_ids", f"{count} tokens", f"at most {limits.max_stop_token_ids} tokens")
    stops = tokens("stop_token_ids", message.stop_token_ids, info)
    return StoppingCriteria(
        stop_token_ids=frozenset(stops if message.ignore_eos else (*stops, *eos_token_ids)),
        stop_strings=tuple(message.stop),
    )
