"""The responses of OpenAI's API, as one JSON object or in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version

from cluster.ingress.openai.formats import Choice, EndpointFormat, reported_prompt, streamed_prompt, token_text
from cluster.ingress.openai.parsing.parts import Json
from cluster.wire.origin_counts import ORIGIN_NAMES, count_origins, origins_as_json
from pilotfish.v1 import generation_pb2

_PROGRAM = f"pilotfish-{version('pilotfish')}"
_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}
_KINDS = {
    generation_pb2.MODEL_KIND_DECODER_ONLY: "decoder-only",
    generation_pb2.MODEL_KIND_ENCODER_DECODER: "encoder-decoder",
}


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """The fields that all chunks of a response share."""

    endpoint: EndpointFormat
    id: str
    created: int
    model: str
    seed: int
    fingerprint: str
    is_lossless: bool
    """Whether answers are exactly those of the model alone."""

    def receipt(self, choice: Choice) -> Json:
        """Return the receipt of an answer as a field of its choice."""
        finished = choice.finished or generation_pb2.GenerationFinished()
        return {"receipt": receipt(self.fingerprint, finished, is_lossless=self.is_lossless)}

    def wrap(self, choices: list[Json], *, chunk: bool, **more: Json | None) -> Json:
        """Return the whole response, or with `chunk` one chunk of it."""
        return {
            "id": self.id,
            "object": self.endpoint.chunk_object if chunk else self.endpoint.whole_object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "seed": self.seed,
            "system_fingerprint": self.fingerprint,
            "lossless": self.is_lossless,
            **more,
        }


def system_fingerprint(started: generation_pb2.GenerationStarted) -> str:
    """Return the name of the program and of the target that generate an answer: equal names, equal answers."""
    return "-".join(filter(None, (_PROGRAM, started.fingerprint)))


def receipt(fingerprint: str, finished: generation_pb2.GenerationFinished, *, is_lossless: bool) -> Json:
    """Return what identifies an answer and what it took: its seed gives the same answer again."""
    usage = finished.usage
    return {
        "seed": finished.seed,
        "fingerprint": fingerprint,
        "lossless": is_lossless,
        "target_passes": usage.target_steps,
        "drafted": usage.drafted_tokens,
        "accepted": usage.accepted_draft_tokens,
        "accepted_by_origin": origins_as_json(usage.accepted_by_origin),
        "drafter": finished.draft_method,
        "resumptions": finished.resumptions,
        "resumed_tokens": usage.resumed_tokens,
    }


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The optional contents of a response that the client requested."""

    logprobs: bool
    token_ids: bool
    usage: bool = False
    """Whether a stream ends with a chunk that has the usage."""
    every_usage: bool = False
    """Whether every chunk of a stream has the usage so far."""
    echo: bool = False
    """Whether each text begins with its prompt."""
    only_echoes: bool = False
    """Whether the text ends with its prompt too."""
    prompt_logprobs: bool = False
    """Whether the log-probabilities of the prompt are reported."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that are reported as the reason if they end an answer. Those of the model are not."""
    interval: int = 1
    """Fewest new tokens of a chunk."""
    drafts: bool = False
    """Whether the verified draft trees are reported."""


def add_delta(
    endpoint: EndpointFormat, choice: Choice, delta: generation_pb2.GenerationDelta, options: ResponseOptions
) -> None:
    """Add a delta to a choice."""
    if options.only_echoes:
        return
    choice.texts.append(delta.text)
    choice.token_ids.extend(delta.token_ids)
    _count(choice, delta)
    choice.logprobs.extend(endpoint.logprobs(choice, delta))
    if options.drafts:
        for name, entries in _reported_drafts(delta).items():
            choice.drafts.setdefault(name, []).extend(entries)


def whole_choice(endpoint: EndpointFormat, choice: Choice, options: ResponseOptions) -> Json:
    """Return a complete choice."""
    choice.texts.insert(0, choice.echo)
    choice.logprobs[:0] = choice.echo_logprobs
    return {
        "index": choice.index,
        **endpoint.whole(choice, endpoint.join(choice.logprobs) if options.logprobs else None),
        **_ending(choice, options),
        **_tokens(choice.token_ids, choice.accepted, options),
        **choice.drafts,
        **(reported_prompt(choice) if endpoint.reports_prompt_per_choice else {}),
    }


def delta_choice(
    endpoint: EndpointFormat, choice: Choice, delta: generation_pb2.GenerationDelta, options: ResponseOptions
) -> Json | None:
    """Return the choice of a chunk, or `None` if the delta holds nothing for the client."""
    if options.only_echoes:
        delta = generation_pb2.GenerationDelta()
    entries = [*choice.echo_logprobs, *endpoint.logprobs(choice, delta)]
    text = choice.echo + delta.text
    choice.echo, choice.echo_logprobs = "", []
    _count(choice, delta)
    content, has_content = endpoint.chunk(choice, text)
    if not has_content and not options.token_ids and not options.drafts and not entries:
        return None
    first, choice.is_started = not choice.is_started, True
    return {
        "index": choice.index,
        **content,
        "logprobs": endpoint.join(entries) if options.logprobs else None,
        "finish_reason": None,
        **_tokens(delta.token_ids, delta.accepted_draft_tokens, options),
        **(_reported_drafts(delta) if options.drafts else {}),
        **(streamed_prompt(choice) if first and endpoint.reports_prompt_per_choice else {}),
    }


def last_choice(endpoint: EndpointFormat, choice: Choice, options: ResponseOptions) -> Json:
    """Return the choice of the last chunk of an answer, with its prompt if the answer has no token."""
    entries = choice.echo_logprobs
    content, _ = endpoint.chunk(choice, choice.echo or None)
    choice.echo, choice.echo_logprobs = "", []
    first, choice.is_started = not choice.is_started, True
    return {
        "index": choice.index,
        **content,
        "logprobs": endpoint.join(entries) if entries else None,
        **_ending(choice, options),
        **(streamed_prompt(choice) if first and endpoint.reports_prompt_per_choice else {}),
    }


def usage(choices: Iterable[Choice]) -> Json:
    """Return the usage of all choices together. A prompt counts once, also when it has several answers."""
    ended = [(choice.counts_prompt, choice.finished.usage) for choice in choices if choice.finished is not None]
    parts = [part for _, part in ended]
    prompt = sum(part.prompt_tokens for counts_prompt, part in ended if counts_prompt)
    completion = sum(part.completion_tokens for part in parts)
    accepted, rejected = _predicted(parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(part.cached_tokens for counts_prompt, part in ended if counts_prompt)
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(part.reasoning_tokens for part in parts),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
        **reduced_tokens(parts),
    }


def reduced_tokens(parts: Iterable[generation_pb2.Usage]) -> Json:
    """Return the entry of the usage for the most tokens of an answer that had no room for `max_tokens`, if one had."""
    reduced = [part.max_tokens for part in parts if part.HasField("max_tokens")]
    return {"max_tokens": min(reduced)} if reduced else {}


def _predicted(parts: Iterable[generation_pb2.Usage]) -> tuple[int, int]:
    """Return how many tokens of the client's prediction are in the answers, and how many are not.

    Without a prediction these are the accepted and the rejected draft tokens.
    """
    found = [
        (part.accepted_prediction_tokens, part.rejected_prediction_tokens)
        if part.HasField("accepted_prediction_tokens")
        else (part.accepted_draft_tokens, part.drafted_tokens - part.accepted_draft_tokens)
        for part in parts
    ]
    return sum(accepted for accepted, _ in found), sum(rejected for _, rejected in found)


def usage_so_far(choice: Choice) -> Json:
    """Return the usage of one choice while it is streamed."""
    return {
        "prompt_tokens": choice.prompt_tokens,
        "completion_tokens": choice.received,
        "total_tokens": choice.prompt_tokens + choice.received,
    }


def model_card(model: generation_pb2.Model) -> Json:
    """Return one entry of `/v1/models`."""
    card: Json = {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "pilotfish",
        "root": model.root or model.id,
        "parent": None,
        "max_model_len": model.max_context_len,
        "lossless": not model.lossy,
        "kind": _KINDS.get(model.kind),
        "draft_method": model.draft_method,
        "shares_between_keys": model.shares_between_keys,
    }
    if model.dequantized_from:
        card["dequantized_from"] = model.dequantized_from
    if model.max_source_len:
        card["max_source_len"] = model.max_source_len
    return card


def _count(choice: Choice, delta: generation_pb2.GenerationDelta) -> None:
    choice.received += len(delta.token_ids)
    choice.drafted += delta.drafted_tokens
    choice.accepted += delta.accepted_draft_tokens
    count_origins(choice.origins, delta.accepted_origins)


def _ending(choice: Choice, options: ResponseOptions) -> Json:
    finished = choice.finished
    if finished is None:
        return {"finish_reason": None}
    stop: str | int | None = None
    if finished.HasField("stop_string"):
        stop = finished.stop_string
    elif finished.HasField("stop_token_id") and finished.stop_token_id in options.stop_token_ids:
        stop = finished.stop_token_id
    reason = _REASONS[finished.reason]
    if reason == "stop" and choice.parser is not None and choice.parser.ends_with_calls:
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": stop}


def _tokens(token_ids: Iterable[int], accepted: int, options: ResponseOptions) -> Json:
    return {"token_ids": list(token_ids), "accepted_draft_tokens": accepted} if options.token_ids else {}


def _reported_drafts(delta: generation_pb2.GenerationDelta) -> Json:
    """Return the verified trees of a delta, and the text that became complete with each of its tokens."""
    return {"token_texts": list(delta.token_texts), "drafts": [_verified_draft(draft) for draft in delta.drafts]}


def _verified_draft(draft: generation_pb2.VerifiedDraft) -> Json:
    return {
        "token_ids": list(draft.token_ids),
        "texts": [token_text(text) for text in draft.token_bytes],
        "parents": list(draft.parents),
        "accepted": list(draft.accepted),
        "committed_tokens": draft.committed_tokens,
        "origins": [ORIGIN_NAMES.get(origin) for origin in draft.origins],
    }
