"""Translate OpenAI's requests to requests of the generation service.

Only rules of the HTTP API itself are checked here. Bounds are checked by the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from cluster.core import bounds
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.core.request import BeamParameters
from cluster.ingress.openai.chat_input import chat_input
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest, Parameters
from cluster.ingress.openai.responses import ResponseOptions
from cluster.wire.codec.grammar import encode_grammar
from cluster.wire.request_values import draw_seed
from pilotfish.v1 import common_pb2, generation_pb2

_SEEDS = 1 << 64
_EARLY_STOPPING: dict[bool | str | None, generation_pb2.EarlyStopping.ValueType] = {
    None: generation_pb2.EARLY_STOPPING_UNSPECIFIED,
    False: generation_pb2.EARLY_STOPPING_NO,
    True: generation_pb2.EARLY_STOPPING_YES,
    "never": generation_pb2.EARLY_STOPPING_NEVER,
}


def completion_requests(
    body: CompletionRequest, limits: LimitsSection, request_id: str, seed: int
) -> list[generation_pb2.GenerateRequest]:
    """Return one request per prompt. Raises `InvalidRequest`.

    Every prompt has the seed that the client gave. Where `seed` is drawn, the answers to all prompts have distinct
    seeds: each prompt's first seed follows the last one of the prompt before.
    """
    bounds.count("prompt", body.prompt, 1, limits.max_prompts, "prompts")
    sampling = _sampling(body, seed, body.logprobs)
    seeds_per_prompt = 0 if body.seed is not None else max(1, body.n or 1, body.best_of or 1)
    # A prompt alone needs no answer, and the service generates at least one token.
    stopping = _stopping(body, 1 if body.only_echoes else body.max_tokens)
    options = _prompt_options(body)
    options.echo = body.echo
    options.report |= body.echo
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        sampling.prompt_logprobs = body.logprobs
    prompts: Sequence[str | list[int]] = body.prompt
    requests = []
    for index, prompt in enumerate(prompts):
        own_id = f"{request_id}-{index}" if len(prompts) > 1 else request_id
        request = _request(body, own_id, sampling, stopping, options)
        request.sampling.seed = (seed + index * seeds_per_prompt) % _SEEDS
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(common_pb2.TokenIds(ids=prompt))
        requests.append(request)
    return requests


def chat_request(body: ChatRequest, request_id: str, seed: int) -> generation_pb2.GenerateRequest:
    """Return the request of a chat. Raises `InvalidRequest`."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, "left out unless logprobs is true")
    chat = chat_input(body, body.messages)
    sampling = _sampling(body, seed, (body.top_logprobs or 0) if body.logprobs else None)
    return _request(body, request_id, sampling, _stopping(body, _chat_max_tokens(body)), _prompt_options(body), chat)


def _request(
    body: Parameters,
    request_id: str,
    sampling: common_pb2.SamplingParameters,
    stopping: generation_pb2.StoppingCriteria,
    prompt_options: generation_pb2.PromptOptions,
    chat: generation_pb2.ChatInput | None = None,
) -> generation_pb2.GenerateRequest:
    """Return a request with what both endpoints have, and the prompt of a chat. Raises `InvalidRequest`."""
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        model=body.model,
        chat=chat,
        sampling=sampling,
        stopping=stopping,
        cache_salt=body.cache_salt,
        max_draft_tokens=_max_draft_tokens(body),
        prediction_text="" if body.prediction is None else body.prediction.content,
        prompt_options=prompt_options,
        skip_special_tokens=body.skip_special_tokens,
        bad_words=body.bad_words,
        return_drafts=body.return_drafts,
        priority=body.priority,
        store=body.store,
        **_answer_fields(body),
    )


def response_options(body: Parameters, *, logprobs: bool) -> ResponseOptions:
    """Return the optional contents of the response to a request. Raises `InvalidRequest`."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs", body.prompt_logprobs, "left out if stream is true")
    return ResponseOptions(
        logprobs=logprobs,
        token_ids=body.return_token_ids,
        usage=body.include_usage,
        every_usage=body.every_usage,
        prompt_logprobs=body.prompt_logprobs is not None,
        stop_token_ids=tuple(body.stop_token_ids),
        interval=body.stream_interval,
        drafts=body.return_drafts,
    )


def seed_of(body: Parameters) -> int:
    """Return the seed of a request; draw one if it has none."""
    return draw_seed() if body.seed is None else body.seed % _SEEDS


def parameter_names(body: Parameters) -> Mapping[str, str]:
    """Map fields of the service's errors to the parameters that the client sent, where the names differ."""
    names = {}
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if body.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
    if body.thinking_token_budget is not None:
        names |= dict.fromkeys(("thinking", "thinking.max_tokens"), "thinking_token_budget")
    constraint = body.requested_grammar()
    if constraint is not None:
        names |= dict.fromkeys(("grammar", f"grammar.{constraint[1].kind.value}"), constraint[0])
    if body.speculation is not None and body.speculation.max_draft_tokens is not None:
        names["max_draft_tokens"] = "speculation.max_draft_tokens"
    return names


class _AnswerFields(TypedDict):
    """Fields of `GenerateRequest` that say how many answers there are, as keyword arguments."""

    n: int | None
    best_of: int | None
    beam_search: generation_pb2.BeamSearch | None


def _answer_fields(body: Parameters) -> _AnswerFields:
    if body.stream and (body.use_beam_search or (body.best_of or 0) > (body.n or 1)):
        raise InvalidRequest(
            "stream",
            True,
            "false with use_beam_search or best_of above n: the answers are known once all are generated",
        )
    if body.use_beam_search:
        beam_search = generation_pb2.BeamSearch(
            length_penalty=body.length_penalty, early_stopping=_EARLY_STOPPING[body.early_stopping]
        )
        return {"n": body.n, "best_of": body.best_of, "beam_search": beam_search}
    if body.length_penalty not in (None, BeamParameters(2).length_penalty):
        raise InvalidRequest("length_penalty", body.length_penalty, "left out unless use_beam_search is true")
    if body.early_stopping not in (None, False):
        raise InvalidRequest("early_stopping", body.early_stopping, "left out unless use_beam_search is true")
    return {"n": body.n, "best_of": body.best_of, "beam_search": None}


def _max_draft_tokens(body: Parameters) -> int | None:
    """Merge `max_draft_tokens` and `speculation`, which must not contradict each other."""
    most, speculation = body.max_draft_tokens, body.speculation
    if speculation is None:
        return most
    if speculation.max_draft_tokens is not None:
        if most not in (None, speculation.max_draft_tokens):
            raise InvalidRequest("max_draft_tokens", most, "left out beside speculation.max_draft_tokens")
        most = speculation.max_draft_tokens
    if speculation.enabled is not None and most is not None and speculation.enabled != (most > 0):
        bound = f"{'true' if most else 'false'} or left out beside max_draft_tokens, which is {most}"
        raise InvalidRequest("speculation.enabled", speculation.enabled, bound)
    return 0 if speculation.enabled is False else most


def _chat_max_tokens(body: ChatRequest) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest("max_tokens", body.max_tokens, "left out beside max_completion_tokens")
    return body.max_completion_tokens


def _sampling(body: Parameters, seed: int, logprobs: int | None) -> common_pb2.SamplingParameters:
    if body.logprob_token_ids and logprobs is None:
        raise InvalidRequest("logprob_token_ids", body.logprob_token_ids, "left out unless logprobs is requested")
    constraint, budget = body.requested_grammar(), body.thinking_token_budget
    return common_pb2.SamplingParameters(
        grammar=None if constraint is None else encode_grammar(constraint[1]),
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=[common_pb2.LogitBias(token_id=int(key), bias=bias) for key, bias in body.logit_bias.items()],
        seed=seed,
        logprobs=logprobs,
        allowed_token_ids=body.allowed_token_ids,
        logprob_token_ids=body.logprob_token_ids,
        prompt_logprobs=body.prompt_logprobs,
        thinking=None if budget in (None, -1) else common_pb2.ThinkingBudget(max_tokens=budget),
    )


def _stopping(body: Parameters, max_tokens: int | None) -> generation_pb2.StoppingCriteria:
    return generation_pb2.StoppingCriteria(
        max_tokens=max_tokens,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        include_stop=body.include_stop_str_in_output,
    )


def _prompt_options(body: Parameters) -> generation_pb2.PromptOptions:
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens", 0, "-1 or at least 1")
    return generation_pb2.PromptOptions(
        add_special_tokens=body.add_special_tokens,
        truncate=body.truncate_prompt_tokens,
        keep_start=body.truncation_side == "right",
        report=body.return_token_ids or body.prompt_logprobs is not None,
    )
