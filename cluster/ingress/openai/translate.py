"""OpenAI's requests as requests of our own service.

Only what the schema's number types cannot hold is checked here, in the validator's words; the rest is
left to the validator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from cluster.core.config import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.core.request import BeamParameters
from cluster.ingress import checks, validate
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest, Parameters
from pilotfish.v1 import common_pb2, generation_pb2

_UINT32_MAX = 2**32 - 1
_EARLY_STOPPING: dict[bool | str, generation_pb2.EarlyStopping.ValueType] = {
    False: generation_pb2.EARLY_STOPPING_NO,
    True: generation_pb2.EARLY_STOPPING_YES,
    "never": generation_pb2.EARLY_STOPPING_NEVER,
}


def completion_requests(
    body: CompletionRequest, limits: LimitsSection, request_id: str, seed: int
) -> list[generation_pb2.GenerateRequest]:
    """One request per prompt; all share the seed. Raises `InvalidRequest`."""
    if len(body.prompt) > limits.max_prompts:
        raise InvalidRequest("prompt", f"{len(body.prompt)} prompts", f"at most {limits.max_prompts} prompts")
    sampling = _sampling(body, limits, seed, _logprobs("logprobs", body.logprobs, limits))
    stopping = _stopping(body, limits, "max_tokens", body.max_tokens)
    plural = _plural(body, limits)
    draft_tokens = _draft_tokens(body)
    several = len(body.prompt) > 1
    prompts: Sequence[str | list[int]] = body.prompt
    requests = []
    for index, prompt in enumerate(prompts):
        request = generation_pb2.GenerateRequest(
            request_id=f"{request_id}-{index}" if several else request_id,
            model=body.model,
            sampling=sampling,
            stopping=stopping,
            cache_salt=body.cache_salt,
            max_draft_tokens=draft_tokens,
            **plural,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(common_pb2.TokenIds(ids=_token_ids("prompt", prompt)))
        requests.append(request)
    return requests


def chat_request(
    body: ChatRequest, limits: LimitsSection, request_id: str, seed: int
) -> generation_pb2.GenerateRequest:
    """The one request of a chat. Raises `InvalidRequest`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, "left out unless logprobs is true")
    alternatives = _logprobs("top_logprobs", body.top_logprobs, limits) or 0
    field, most = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        if most not in (None, body.max_completion_tokens):
            raise InvalidRequest("max_tokens", most, "left out beside max_completion_tokens")
        field, most = "max_completion_tokens", body.max_completion_tokens
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        model=body.model,
        chat=generation_pb2.ChatInput(
            messages=[
                generation_pb2.ChatMessage(role=turn.role, content=turn.content, name=turn.name)
                for turn in body.messages
            ]
        ),
        sampling=_sampling(body, limits, seed, alternatives if body.logprobs else None),
        stopping=_stopping(body, limits, field, most),
        cache_salt=body.cache_salt,
        max_draft_tokens=_draft_tokens(body),
        **_plural(body, limits),
    )


def seed_of(body: Parameters) -> int:
    """The request's seed, or one drawn for it. Raises `InvalidRequest` (`seed`)."""
    return validate.draw_seed() if body.seed is None else checks.integer("seed", body.seed, 0, validate.MAX_SEED)


class _Plural(TypedDict):
    """Fields of a request, as they are given to its constructor."""

    n: int | None
    best_of: int | None
    beam_search: generation_pb2.BeamSearch | None


def _plural(body: Parameters, limits: LimitsSection) -> _Plural:
    """How many answers, and how they are found. Raises `InvalidRequest`."""
    n = None if body.n is None else checks.integer("n", body.n, 1, limits.max_n)
    best_of = None if body.best_of is None else checks.integer("best_of", body.best_of, 1, limits.max_n)
    if body.stream and (body.use_beam_search or (best_of or 0) > (n or 1)):
        raise InvalidRequest(
            "stream", True, "false with use_beam_search or best_of above n: the answers are known once all are made"
        )
    if body.use_beam_search:
        beam_search = generation_pb2.BeamSearch(
            length_penalty=body.length_penalty, early_stopping=_EARLY_STOPPING[body.early_stopping]
        )
        return {"n": n, "best_of": best_of, "beam_search": beam_search}
    if body.length_penalty not in (None, BeamParameters(2).length_penalty):
        raise InvalidRequest("length_penalty", body.length_penalty, "left out unless use_beam_search is true")
    if body.early_stopping is not False:
        raise InvalidRequest("early_stopping", body.early_stopping, "left out unless use_beam_search is true")
    return {"n": n, "best_of": best_of, "beam_search": None}


def _draft_tokens(body: Parameters) -> int | None:
    """Most guesses at once: said in one place, or the same in both. Raises `InvalidRequest`."""
    wish = body.speculation
    most = None if body.max_draft_tokens is None else validate.draft_tokens("max_draft_tokens", body.max_draft_tokens)
    if wish is None:
        return most
    if wish.max_draft_tokens is not None:
        if most not in (None, wish.max_draft_tokens):
            raise InvalidRequest("max_draft_tokens", most, "left out beside speculation.max_draft_tokens")
        most = validate.draft_tokens("speculation.max_draft_tokens", wish.max_draft_tokens)
    if wish.enabled is not None and most is not None and wish.enabled != (most > 0):
        bound = f"{'true' if most else 'false'} or left out beside max_draft_tokens, which is {most}"
        raise InvalidRequest("speculation.enabled", wish.enabled, bound)
    return 0 if wish.enabled is False else most


def _sampling(
    body: Parameters, limits: LimitsSection, seed: int, logprobs: int | None
) -> common_pb2.SamplingParameters:
    if len(body.logit_bias) > limits.max_logit_bias:
        raise InvalidRequest("logit_bias", f"{len(body.logit_bias)} tokens", f"at most {limits.max_logit_bias} tokens")
    return common_pb2.SamplingParameters(
        temperature=body.temperature,
        top_k=None if body.top_k is None else _top_k(body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=[
            common_pb2.LogitBias(token_id=_token_of("logit_bias", key), bias=bias)
            for key, bias in body.logit_bias.items()
        ],
        seed=seed,
        logprobs=logprobs,
    )


def _stopping(
    body: Parameters, limits: LimitsSection, field: str, max_tokens: int | None
) -> generation_pb2.StoppingCriteria:
    return generation_pb2.StoppingCriteria(
        max_tokens=None if max_tokens is None else checks.integer(field, max_tokens, 1, limits.max_output_tokens),
        stop=body.stop,
        stop_token_ids=_token_ids("stop_token_ids", body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )


def _logprobs(field: str, value: int | None, limits: LimitsSection) -> int | None:
    return None if value is None else checks.integer(field, value, 0, limits.max_logprobs)


def _top_k(value: int) -> int:
    """-1 is vLLM's word for all tokens."""
    return 0 if value == -1 else checks.integer("top_k", value, 0, validate.MAX_TOP_K)


def _token_ids(field: str, tokens: list[int]) -> list[int]:
    for position, token in enumerate(tokens):
        if not 0 <= token <= _UINT32_MAX:
            raise InvalidRequest(f"{field}[{position}]", token, "a token id of the model's vocabulary")
    return tokens


def _token_of(field: str, key: str) -> int:
    """JSON's objects have strings for keys, also where they are token ids."""
    if not (key.isascii() and key.isdecimal()) or len(key) > len(str(_UINT32_MAX)) or int(key) > _UINT32_MAX:
        raise InvalidRequest(field, key, "a token id of the model's vocabulary")
    return int(key)
