"""The service's events as one response or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any

from pydantic_core import to_json

from cluster.ingress.openai.errors import ErrorResponse
from cluster.ingress.openai.event_ids import EventId, EventIds, Stage
from cluster.ingress.openai.formats import (
    Choice,
    EndpointFormat,
    finite,
    prompt_scores,
    reported_prompt,
    streamed_prompt,
    token_text,
)
from cluster.ingress.openai.parsing.parts import Json
from cluster.ingress.openai.responses import (
    ResponseMetadata,
    ResponseOptions,
    add_delta,
    delta_choice,
    last_choice,
    usage,
    usage_so_far,
    whole_choice,
)
from pilotfish.v1 import generation_pb2

Events = AsyncGenerator[tuple[int, generation_pb2.GenerateResponse], None]
"""Pairs of the index of a choice and an event."""


async def whole_response(
    events: Events, choices: list[Choice], metadata: ResponseMetadata, options: ResponseOptions
) -> Json:
    """Read all events and return the response."""
    async for index, event in events:
        if event.HasField("started"):
            note_prompt(choices[index], event.started, metadata.endpoint, options)
        elif event.HasField("delta"):
            _note_acceptance(choices[index], event.delta)
            add_delta(metadata.endpoint, choices[index], event.delta, options)
        elif event.HasField("finished"):
            choices[index].finished = _ended(event.finished, options)
    complete = [whole_choice(metadata.endpoint, choice, options) | metadata.receipt(choice) for choice in choices]
    prompt = {} if metadata.endpoint.reports_prompt_per_choice else reported_prompt(choices[0])
    return metadata.wrap(complete, chunk=False, usage=usage(choices), **_draft_metrics(choices), **prompt)


async def chunks(
    beginning: Awaitable[tuple[ResponseMetadata, EventId]],
    events: Events,
    choices: list[Choice],
    options: ResponseOptions,
    on_error: Callable[[Exception], ErrorResponse],
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events: one per commit, the usage if requested, `[DONE]`. Each has an id, see `EventIds`.

    `beginning` is what the first event says, and what was sent before. An error becomes an event too, because the
    status line is already sent.
    """
    try:
        metadata, last = await beginning
    except Exception as error:
        await events.aclose()
        yield b"data: " + on_error(error).body() + b"\n\n"
        yield b"data: [DONE]\n\n"
        return
    except BaseException:
        await events.aclose()
        raise
    stage, ids, joining = last.stage, EventIds(last, choices), _Joining(options.interval)
    try:
        async for index, event in events:
            _note_acceptance(choices[index], event.delta)
            for sent in joining.add(index, event):
                chunk = _chunk(metadata, choices[index], sent, options)
                if chunk is not None:
                    yield _server_sent(chunk, ids.next(stage))
        if options.usage and stage is Stage.CHOICES:
            stage = Stage.USAGE
            summary = metadata.wrap([], chunk=True, usage=usage(choices), **_draft_metrics(choices))
            yield _server_sent(summary, ids.next(stage))
    except Exception as error:
        yield _with_id(on_error(error).body(), ids.next(stage))
    else:
        stage = Stage.DONE
    finally:
        await events.aclose()
    yield _with_id(b"[DONE]", ids.next(stage))


class _Joining:
    """Fewer and larger chunks (`stream_interval`): deltas of one choice are joined until they have enough tokens."""

    def __init__(self, interval: int) -> None:
        """`interval` is the least number of tokens in a chunk. With 1, nothing is joined."""
        self._interval = interval
        self._held: dict[int, generation_pb2.GenerateResponse] = {}
        self._begun: set[int] = set()

    def add(self, index: int, event: generation_pb2.GenerateResponse) -> list[generation_pb2.GenerateResponse]:
        """Return the events of a choice to send now. Its first delta, and whatever is no delta, is not held back."""
        if self._interval <= 1:
            return [event]
        held = self._held.pop(index, None)
        if not event.HasField("delta"):
            return [event] if held is None else [held, event]
        joined = event if held is None else _extended(held, event.delta)
        if index in self._begun and len(joined.delta.token_ids) < self._interval:
            self._held[index] = joined
            return []
        self._begun.add(index)
        return [joined]


def _extended(
    event: generation_pb2.GenerateResponse, more: generation_pb2.GenerationDelta
) -> generation_pb2.GenerateResponse:
    """Return the event with the text and tokens of another delta. The drafted and accepted tokens add up."""
    delta = event.delta
    delta.text += more.text
    for name in ("token_ids", "logprobs", "token_bytes", "drafts", "token_texts", "accepted_origins"):
        getattr(delta, name).extend(getattr(more, name))
    delta.accepted_draft_tokens += more.accepted_draft_tokens
    delta.drafted_tokens += more.drafted_tokens
    return event


def _chunk(
    metadata: ResponseMetadata, choice: Choice, event: generation_pb2.GenerateResponse, options: ResponseOptions
) -> Json | None:
    """Return the chunk of one event, or `None` if the event holds nothing for the client."""
    endpoint, is_first = metadata.endpoint, not choice.is_started
    if event.HasField("started"):
        note_prompt(choice, event.started, endpoint, options)
        return None
    if event.HasField("delta"):
        content = delta_choice(endpoint, choice, event.delta, options)
        if content is None:
            return None
    else:
        choice.finished = _ended(event.finished, options)
        content = last_choice(endpoint, choice, options) | metadata.receipt(choice)
    more: dict[str, Json | None] = {}
    if options.usage:
        more["usage"] = usage_so_far(choice) if options.every_usage else None
    if is_first and not endpoint.reports_prompt_per_choice:
        more |= streamed_prompt(choice)
    return metadata.wrap([content], chunk=True, **more)


def _ended(finished: generation_pb2.GenerationFinished, options: ResponseOptions) -> generation_pb2.GenerationFinished:
    """Return the end of an answer. One that is not sent has no tokens and ends as one of no length."""
    if options.only_echoes:
        finished.usage.completion_tokens = 0
        finished.reason = generation_pb2.FINISH_REASON_LENGTH
    return finished


def _server_sent(payload: Json, event_id: str) -> bytes:
    return _with_id(to_json(payload), event_id)


def _with_id(data: bytes, event_id: str) -> bytes:
    begin = b"id: " + event_id.encode() + b"\n" if event_id else b""
    return begin + b"data: " + data + b"\n\n"


def _note_acceptance(choice: Choice, delta: generation_pb2.GenerationDelta) -> None:
    """Record what one step verified for an answer."""
    if delta.drafted_tokens:
        choice.acceptances.append((delta.drafted_tokens, delta.accepted_draft_tokens))


def _draft_metrics(choices: Iterable[Choice]) -> Json:
    """Return the field `metrics` of a response, in the form of vLLM; nothing if no drafts were verified.

    Entry `j` of the histogram is the number of steps that accepted `j` drafted tokens. `num_spec_tokens` is the
    largest number that one step verified.
    """
    steps = [step for choice in choices for step in choice.acceptances]
    if not steps:
        return {}
    most = max(drafted for drafted, _ in steps)
    histogram = [0] * (most + 1)
    for _, count in steps:
        histogram[count] += 1
    drafted, accepted = (sum(values) for values in zip(*steps, strict=True))
    return {
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / len(steps),
                "draft_acceptance_rate": accepted / drafted,
                "acceptance_histogram": histogram,
                "num_spec_steps": len(steps),
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
                "num_spec_tokens": most,
            }
        }
    }


def note_prompt(
    choice: Choice, started: generation_pb2.GenerationStarted, endpoint: EndpointFormat, options: ResponseOptions
) -> None:
    """Record the prompt of a choice. An answer that an earlier response completed gets the prompt's length."""
    choice.prompt_tokens = started.prompt_tokens
    if choice.finished is not None:
        choice.finished.usage.prompt_tokens = started.prompt_tokens
    if choice.is_started:
        return  # an earlier response had it
    endpoint.begin(choice, started)
    if options.token_ids:
        choice.prompt_token_ids = list(started.prompt_token_ids)
    if options.prompt_logprobs:
        choice.prompt_logprobs = _prompt_logprobs(started)
    if not options.echo:
        return
    shown = b"".join(started.prompt_token_bytes).decode("utf-8", "replace")
    # Tokens that the tokenizer adds in front, and a space that it adds to the first one, are no part of a text.
    choice.echo = choice.prompt_text if choice.prompt_text and shown.endswith(choice.prompt_text) else shown
    if options.logprobs:
        choice.utf8.reset()  # an id may say how far a choice had come whose beginning was not sent
        choice.text_length = len(choice.echo) - len(shown)
        choice.echo_logprobs = endpoint.prompt_logprobs(choice, started)


def _prompt_logprobs(started: generation_pb2.GenerationStarted) -> list[Mapping[str, Any] | None]:
    """Return vLLM's form: nothing for the first token, then each token's own log-probability and the best ones."""
    found: list[Mapping[str, Any] | None] = []
    for entry, own in zip(prompt_scores(started), started.prompt_token_bytes, strict=True):
        if entry is None:
            found.append(None)
            continue
        values = {
            str(top.token_id): {
                "logprob": finite(top.logprob),
                "rank": rank,
                "decoded_token": token_text(top.token_bytes),
            }
            for rank, top in enumerate(entry.top, 1)
        }
        values.setdefault(
            str(entry.token_id),
            {"logprob": finite(entry.logprob), "rank": entry.rank or None, "decoded_token": token_text(own)},
        )
        found.append(values)
    return found
