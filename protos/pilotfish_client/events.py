"""What a stream consists of, and whole answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pilotfish.v1 import common_pb2, generation_pb2


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """A stop token, a stop string, or the model's end of sequence."""
    LENGTH = "length"
    """`max_tokens` or the context length."""
    ABORT = "abort"
    """The request was aborted, or its client left."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, and of alternatives at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Token ids and log-probabilities of the most probable tokens, best first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token and step counts of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    accepted_draft_tokens: int = 0
    target_steps: int = 0
    """Forward passes of the target that decided tokens."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were stored already."""
    accepted_by_origin: Mapping[str, int] = field(default_factory=dict)
    """The accepted draft tokens by origin: `request` (the request itself), `earlier` (earlier answers), `trained`
    (trained drafts) and `forced` (by a grammar)."""


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted. The first event of a stream."""

    request_id: str
    model: str
    seed: int
    """The seed in force. Sending it again gives the same answer."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that were committed together."""

    index: int
    """Number of the answer, from 0."""
    text: str
    token_ids: tuple[int, ...]
    accepted_draft_tokens: int
    """How many of the leading tokens are accepted draft tokens."""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one answer."""

    index: int
    reason: FinishReason
    usage: Usage
    stop: str | int | None = None
    """The stop string or the stop token that ended it."""
    draft_method: str = ""
    is_lossless: bool = True
    """Whether the answer is exactly that of the model alone."""


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def usage(self) -> Usage:
        """Token and step counts."""
        return self.finished.usage


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers to one prompt."""

    started: Started
    choices: tuple[Choice, ...]
    resumptions: int = 0
    """How often the client continued the stream after a lost connection."""

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.choices[0].text


@dataclass(slots=True)
class Collector:
    """Collects the events of a stream into whole answers."""

    started: Started | None = None
    texts: dict[int, list[str]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add the next event."""
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Finished):
            self.ends[event.index] = event
        else:
            self.texts.setdefault(event.index, []).append(event.text)
            self.tokens.setdefault(event.index, []).extend(event.token_ids)
            self.logprobs.setdefault(event.index, []).extend(event.logprobs)

    def completion(self, resumptions: int) -> Completion:
        """The answers. Raises `ValueError` for a stream without its first event."""
        if self.started is None:
            raise ValueError("the stream has no first event")
        choices = tuple(
            Choice(
                "".join(self.texts.get(index, ())),
                tuple(self.tokens.get(index, ())),
                end,
                tuple(self.logprobs.get(index, ())),
            )
            for index, end in sorted(self.ends.items())
        )
        return Completion(self.started, choices, resumptions)


def to_event(response: generation_pb2.GenerateResponse) -> Event | None:
    """The event in a response; `None` for a kind that this client does not know."""
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            return Started(started.request_id, started.model, started.seed, started.prompt_tokens)
        case "delta":
            delta = response.delta
            return Delta(
                response.index,
                delta.text,
                tuple(delta.token_ids),
                delta.accepted_draft_tokens,
                _logprobs(delta.logprobs),
            )
        case "finished":
            return _finished(response)
        case _:
            return None


_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}


def _finished(response: generation_pb2.GenerateResponse) -> Finished:
    end = response.finished
    usage = end.usage
    stop: str | int | None = end.stop_string if end.HasField("stop_string") else None
    if end.HasField("stop_token_id"):
        stop = end.stop_token_id
    counts = Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.drafted_tokens,
        usage.accepted_draft_tokens,
        usage.target_steps,
        usage.cached_tokens,
        {name: getattr(usage.accepted_by_origin, name) for name in ("request", "earlier", "trained", "forced")},
    )
    reason = _REASONS.get(end.reason, FinishReason.STOP)
    return Finished(response.index, reason, counts, stop, end.draft_method, not response.lossy)


def _logprobs(messages: Iterable[common_pb2.TokenLogprobs]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(each.token_id, each.logprob, tuple((top.token_id, top.logprob) for top in each.top))
        for each in messages
    )
