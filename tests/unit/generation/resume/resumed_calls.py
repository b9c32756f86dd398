"""A call to a generation service, cut after some events, and the call that resumes it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from cluster.core.request import TokenLogprobs
from cluster.generation.events import Delta, Event, Finished, Started
from cluster.generation.service import GenerationService
from pilotfish.v1 import generation_pb2


@dataclass
class ReceivedAnswer:
    """All that a client has of one answer."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | None = None
    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def add(self, event: Delta | Finished) -> None:
        if isinstance(event, Finished):
            assert self.end is None
            self.end = event
            return
        assert self.end is None
        self.text += event.text
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.drafted += event.drafted
        self.accepted += event.accepted
        self.steps += bool(event.tokens)

    @property
    def content(self) -> tuple[object, ...]:
        """What may not depend on interruptions."""
        assert self.end is not None
        end = (self.end.reason, self.end.stop_string, self.end.stop_token)
        usage = (self.end.usage.prompt_tokens, self.end.usage.completion_tokens)
        return self.text, self.tokens, self.logprobs, end, usage


def collect(events: Sequence[Event], answers: list[ReceivedAnswer]) -> None:
    """Add events to the answers of a client."""
    for event in events:
        if not isinstance(event, Started):
            answers[event.index].add(event)


def new_answers(request: generation_pb2.GenerateRequest) -> list[ReceivedAnswer]:
    """A client's answers before the first event."""
    return [ReceivedAnswer() for _ in range(request.n or 1)]


async def read_events(
    service: GenerationService, request: generation_pb2.GenerateRequest, most: int | None = None
) -> list[Event]:
    """The first `most` events of a call, or all."""
    events: list[Event] = []
    async with aclosing(service.generate(request)) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == most:
                break
    return events


def resuming(
    request: generation_pb2.GenerateRequest, answers: Sequence[ReceivedAnswer], *, with_tokens: bool
) -> generation_pb2.GenerateRequest:
    """The request that continues after what the client has."""
    again = generation_pb2.GenerateRequest()
    again.CopyFrom(request)
    for index, answer in enumerate(answers):
        again.resume.add(
            index=index,
            token_count=len(answer.tokens),
            token_ids=answer.tokens if with_tokens else (),
            finished=answer.end is not None,
            drafted_tokens=answer.drafted,
            accepted_draft_tokens=answer.accepted,
            target_steps=answer.steps,
        )
    return again
