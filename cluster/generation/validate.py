"""The only validator of public requests. Both APIs reach it through gRPC and so share its bounds and errors.

Errors name fields as OpenAI's API does.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.core import bounds
from cluster.core.config.draft_section import LearnsFrom
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from cluster.core.ids import CacheSalt, RequestId, check_request_id, scoped_request_id, scoped_salt
from cluster.core.request import GenerationRequest, SamplingParameters, StoppingCriteria, TextOptions
from cluster.core.verification import TargetInfo
from cluster.generation.answer_count import AnswerCount, answer_count
from cluster.generation.resume import ReceivedPart, check_lengths, received_parts
from cluster.generation.text.prompts import (
    Prompt,
    PromptOptions,
    decode_prompt,
    decode_prompt_options,
    most_prompt_tokens,
    prediction_too_long,
    prompt_too_long,
)
from cluster.wire.codec.common import SamplingLimits, decode_sampling, decode_texts
from cluster.wire.request_values import draw_seed
from pilotfish.v1 import common_pb2, generation_pb2


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request whose values are checked and whose prompt is not yet tokenized."""

    request_id: RequestId
    """The request's id, as the client gave or received it."""
    client: str
    """The name of the caller's API key; empty where no keys are demanded."""
    prompt: Prompt
    prompt_options: PromptOptions
    sampling: SamplingParameters
    stopping: StoppingCriteria
    """When the answer ends. `fit_to_context` sets `max_tokens` when the length of the prompt is known."""
    max_tokens: int | None
    """Most tokens of an answer that the client asks for, before `fit_to_context` reduces them to what fits."""
    text: TextOptions
    bad_words: tuple[str, ...]
    """Words that the answer never contains, besides the token sequences in `sampling`."""
    answers: AnswerCount
    cache_salt: CacheSalt
    """The request's salt with the name of its client."""
    max_draft_tokens: int | None
    prediction: str | tuple[int, ...]
    """The expected answer, as text that is not yet tokenized or as tokens; empty if there is none."""
    received: tuple[ReceivedPart, ...]
    """What the caller has of each generated answer; empty for a new request."""
    returns_drafts: bool = False
    """Whether draft trees are reported."""
    streams: bool = True
    """Whether the caller reads each response as it comes."""
    takes_min_tokens: bool = False
    """Whether the model's `min_tokens` holds, because the request gives none."""
    traceparent: str = ""
    """The span that the request belongs to, in W3C's form; empty if there is none."""
    priority: int = 0
    """Requests with a lower priority start earlier."""
    allows_learning: bool = False
    """Whether drafters may be trained on prompt and answer."""

    @property
    def scoped_id(self) -> RequestId:
        """The request's id in the coordinator."""
        return scoped_request_id(self.client, self.request_id)


def validate(
    request: generation_pb2.GenerateRequest,
    info: TargetInfo,
    limits: LimitsSection,
    eos_token_ids: Sequence[int],
    *,
    shares_between_keys: bool = False,
    learns_from: LearnsFrom = "none",
) -> ValidatedRequest:
    """Check every value that does not depend on the length of the prompt in tokens.

    `shares_between_keys`: see `ServerSection.sharing_between_keys`; `learns_from`: see `DraftSection.learns_from`.
    Raises `InvalidRequest`, and `UnknownModel` for another model than the served one.
    """
    check_model(request.model if request.HasField("model") else None, info)
    bounds.text("coordinator", request.coordinator, bounds.MAX_NAME_BYTES)
    request_id = _request_id(request)
    client = bounds.client(request.client)
    salt = bounds.text("cache_salt", request.cache_salt, bounds.MAX_SALT_BYTES)
    prompt = decode_prompt(request, info, limits)
    prompt_options = decode_prompt_options(request.prompt_options, info)
    stopping = _stopping(request.stopping, info, limits, eos_token_ids)
    sampling = replace(
        _sampling(request.sampling, info, limits),
        end_token_ids=tuple(sorted(stopping.stop_token_ids)),
        min_tokens=bounds.integer(
            "min_tokens", request.stopping.min_tokens, 0, limits.max_output_tokens or info.max_context_len
        ),
    )
    if info.is_encoder_decoder and sampling.prompt_logprobs is not None:
        bound = "left out: an encoder-decoder model gives no probabilities to the text that it reads"
        raise InvalidRequest("prompt_logprobs", sampling.prompt_logprobs, bound)
    if (sampling.grammar is not None or request.chat.HasField("required_tool")) and request.stopping.ignore_eos:
        raise InvalidRequest("ignore_eos", True, "false with a grammar: an answer that matches it ends")
    answers = answer_count(request, sampling, stopping, info, limits)
    return ValidatedRequest(
        request_id=request_id,
        client=client,
        prompt=prompt,
        prompt_options=prompt_options,
        sampling=sampling,
        stopping=stopping,
        max_tokens=_requested_tokens(request.stopping, info, limits),
        text=TextOptions(
            skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
            include_stop=request.stopping.include_stop,
        ),
        bad_words=decode_texts(request.bad_words, "bad_words"),
        answers=answers,
        cache_salt=scoped_salt(client, salt, shares_between_keys=shares_between_keys),
        max_draft_tokens=bounds.integer("max_draft_tokens", request.max_draft_tokens, 0, bounds.MAX_TREE_NODES)
        if request.HasField("max_draft_tokens")
        else None,
        prediction=_prediction(request, info, limits),
        received=received_parts(request, answers, info, limits),
        traceparent=bounds.text("traceparent", request.traceparent, bounds.MAX_TRACEPARENT_BYTES),
        returns_drafts=request.return_drafts,
        streams=request.stream if request.HasField("stream") else True,
        takes_min_tokens=not request.stopping.HasField("min_tokens"),
        priority=request.priority,
        allows_learning=allows_learning(request, learns_from),
    )


def fit_to_context(
    request: ValidatedRequest,
    prompt: tuple[int, ...],
    prediction: tuple[int, ...],
    info: TargetInfo,
    limits: LimitsSection,
    longest: int,
) -> GenerationRequest:
    """Check prompt, answer and prediction against the context and the limits.

    `max_tokens` becomes what the client asks for, but at most what fits behind the prompt into `longest` tokens, the
    longest sequence that the engine can hold. For an encoder-decoder model, `prompt` is the source. Raises
    `InvalidRequest`.
    """
    if not prompt:
        raise InvalidRequest(request.prompt.field, (), "of at least one token")
    if len(prompt) > most_prompt_tokens(info):
        raise prompt_too_long(request.prompt.field, len(prompt), info)
    start, source = (info.decoder_start, prompt) if info.is_encoder_decoder else (prompt, ())
    wanted = request.max_tokens or limits.max_output_tokens or info.max_context_len
    max_tokens = min(wanted, max(1, longest - len(start)))
    if request.sampling.min_tokens > max_tokens:
        raise InvalidRequest("min_tokens", request.sampling.min_tokens, f"at most max_tokens, which is {max_tokens}")
    alternatives = request.sampling.prompt_logprobs
    if alternatives is not None and (alternatives + 1) * len(prompt) > bounds.MAX_PROMPT_LOGPROBS:
        most = bounds.MAX_PROMPT_LOGPROBS // len(prompt) - 1
        raise InvalidRequest("prompt_logprobs", alternatives, f"at most {most} for a prompt of {len(prompt)} tokens")
    if len(prediction) > limits.max_prediction_tokens:
        raise prediction_too_long(len(prediction), "tokens", limits)
    check_lengths(request.received, max_tokens)
    return GenerationRequest(
        request_id=request.scoped_id,
        client=request.client,
        traceparent=request.traceparent,
        prompt=start,
        source=source,
        sampling=replace(
            request.answers.engine_sampling(request.sampling),
            bad_words=(*info.bad_words, *request.sampling.bad_words),
            no_repeat_ngram_size=request.sampling.no_repeat_ngram_size or info.no_repeat_ngram_size,
            min_tokens=min(info.min_tokens, max_tokens) if request.takes_min_tokens else request.sampling.min_tokens,
        ),
        stopping=replace(request.stopping, max_tokens=max_tokens),
        text=request.text,
        cache_salt=request.cache_salt,
        n=request.answers.engine_n,
        beam=request.answers.beam,
        max_draft_tokens=request.max_draft_tokens,
        prediction=prediction if request.answers.beam is None else (),  # beams are not drafted for
        returns_drafts=request.returns_drafts,
        streams=request.streams,
        priority=request.priority,
        allows_learning=request.allows_learning,
    )


def _requested_tokens(stopping: generation_pb2.StoppingCriteria, info: TargetInfo, limits: LimitsSection) -> int | None:
    """Return `max_tokens` of a request, which may be more than fit behind the prompt. Raises `InvalidRequest`."""
    if not stopping.HasField("max_tokens"):
        return None
    if stopping.max_tokens > info.max_context_len:
        raise ContextLengthExceeded.of_answer("max_tokens", stopping.max_tokens, info.max_context_len)
    return bounds.integer("max_tokens", stopping.max_tokens, 1, limits.max_output_tokens or info.max_context_len)


def check_model(name: str | None, info: TargetInfo) -> None:
    """Refuse any name but the served model's. `None` means the served model. Raises `UnknownModel`."""
    if name is not None and name != info.model:
        raise UnknownModel("model", name, f"a served model: {info.model}")


def _request_id(request: generation_pb2.GenerateRequest) -> RequestId:
    if request.HasField("request_id"):
        return check_request_id(request.request_id)
    return RequestId(secrets.token_hex(16))


def allows_learning(request: generation_pb2.GenerateRequest, learns_from: LearnsFrom) -> bool:
    """Whether the settings, the API key and the request itself all allow to learn from its texts."""
    if learns_from == "none" or (request.HasField("store") and not request.store):
        return False
    return learns_from == "all" or request.client_allows_learning


def _prediction(
    request: generation_pb2.GenerateRequest, info: TargetInfo, limits: LimitsSection
) -> str | tuple[int, ...]:
    if request.WhichOneof("prediction") != "prediction_token_ids":
        return request.prediction_text
    ids = request.prediction_token_ids.ids
    if len(ids) > limits.max_prediction_tokens:
        raise prediction_too_long(len(ids), "tokens", limits)
    return bounds.tokens("prediction", ids, 0, limits.max_prediction_tokens, info.vocabulary_size)


def _sampling(message: common_pb2.SamplingParameters, info: TargetInfo, limits: LimitsSection) -> SamplingParameters:
    public = SamplingLimits(limits.max_logprobs, limits.max_logit_bias, info.vocabulary_size)
    sampling = decode_sampling(message, limits=public)
    if info.is_encoder_decoder and not message.HasField("temperature"):
        sampling = replace(sampling, temperature=0.0)  # a translation is wanted, not a sample of translations
    return sampling if message.HasField("seed") else replace(sampling, seed=draw_seed())


def _stopping(
    message: generation_pb2.StoppingCriteria,
    info: TargetInfo,
    limits: LimitsSection,
    eos_token_ids: Sequence[int],
) -> StoppingCriteria:
    bounds.count("stop", message.stop, 0, limits.max_stop_strings, "strings")
    for stop in message.stop:
        if not 1 <= len(stop) <= limits.max_stop_string_chars:
            raise InvalidRequest("stop", stop, f"between 1 and {limits.max_stop_string_chars} characters")
    stops = bounds.tokens("stop_token_ids", message.stop_token_ids, 0, limits.max_stop_token_ids, info.vocabulary_size)
    return StoppingCriteria(
        stop_token_ids=frozenset(stops if message.ignore_eos else (*stops, *eos_token_ids)),
        stop_strings=tuple(message.stop),
        forced_eos_token_id=None if message.ignore_eos else info.forced_eos_token_id,
    )
