"""What is known of one request of a client: who sent it, how long it took, and what it brought."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from pilotfish.v1 import generation_pb2

Fields = dict[str, str | int | float | list[str] | None]

current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)
"""The record of the HTTP request that is being answered."""


@dataclass(slots=True)
class RequestRecord:
    """Collects one request. It never holds prompts, answers or keys."""

    clock: Callable[[], float]
    """Returns the present time, in seconds."""
    arrived_at: float = field(init=False)
    """Time of arrival."""
    traceparent: str = ""
    """The span of the request, in W3C's form; empty if it is not traced."""
    client: str = ""
    """The name of the caller's API key."""
    answer_id: str = ""
    """The request's id in the generation service."""
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    target_steps: int = 0
    queue_seconds: float | None = None
    """How long the request waited before it ran, in seconds."""
    first_seconds: float | None = None
    """Time from the arrival to the first tokens, in seconds."""
    finish: list[str] = field(default_factory=list)
    """The finish reasons of the answers, in the order in which they ended."""
    error: str | None = None
    """The name of the error that ended the request."""

    def __post_init__(self) -> None:
        self.arrived_at = self.clock()

    @property
    def seconds(self) -> float:
        """Time since the arrival, in seconds."""
        return self.clock() - self.arrived_at

    def note_request(self, request: generation_pb2.GenerateRequest) -> None:
        """Take the caller's name from a request to the generation service, and give it the span."""
        self.client = request.client or self.client
        if self.traceparent:
            request.traceparent = self.traceparent

    def note(self, response: generation_pb2.GenerateResponse) -> None:
        """Take what one response says."""
        if response.HasField("started"):
            started = response.started
            self.answer_id, self.model = started.request_id, started.model
            self.prompt_tokens += started.prompt_tokens
            if started.HasField("queue_seconds"):
                self.queue_seconds = max(self.queue_seconds or 0.0, started.queue_seconds)
        elif response.HasField("delta"):
            self.first_seconds = self.seconds if self.first_seconds is None else self.first_seconds
        elif response.HasField("finished"):
            usage = response.finished.usage
            name = generation_pb2.FinishReason.Name(response.finished.reason)
            self.finish.append(name.removeprefix("FINISH_REASON_").lower())
            self.completion_tokens += usage.completion_tokens
            self.cached_tokens = max(self.cached_tokens, usage.cached_tokens)
            self.drafted_tokens += usage.drafted_tokens
            self.accepted_tokens += usage.accepted_draft_tokens
            self.target_steps += usage.target_steps

    def fields(self) -> Fields:
        """Return what a log line says. Requests that generated nothing have no counts."""
        fields: Fields = {"client": self.client or None, "error": self.error, "total_seconds": round(self.seconds, 6)}
        if not self.answer_id:
            return fields
        return fields | {
            "answer_id": self.answer_id,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "target_steps": self.target_steps,
            "finish": list(self.finish),
            "queue_seconds": None if self.queue_seconds is None else round(self.queue_seconds, 6),
            "first_token_seconds": None if self.first_seconds is None else round(self.first_seconds, 6),
        }


logger = logging.getLogger("pilotfish.requests")


def log_request(fields: Fields) -> None:
    """Log one line: ids, names, counts and times; never prompts, answers, keys or an error's text.

    A formatter for JSON finds the fields in the attribute `fields` of the log record.
    """
    if logger.isEnabledFor(logging.INFO):
        known = {name: value for name, value in fields.items() if value is not None and value != []}
        text = " ".join(f"{name}={_shown(value)}" for name, value in known.items())
        logger.info("request %s", text, extra={"fields": known})


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
