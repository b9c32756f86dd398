"""Ids of server-sent events. A client that sends the last one back, with the same body, gets the events after it.

An id holds what an ingress needs to continue: the request's id and seed, and how many tokens of each choice the client
has. The tokens themselves are not in it. An id grants nothing that its body does not, so it is checked and not signed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from cluster.core.errors import InvalidRequest
from cluster.core.ids import is_request_id
from cluster.ingress.openai.formats import Choice
from cluster.wire.origin_counts import ORIGIN_NAMES, origins_as_json
from pilotfish.v1 import common_pb2, generation_pb2

HEADER = "Last-Event-ID"
MAX_ID_CHARS = 16_384
MOST_CHOICES = 192
"""Most choices of a response whose events have ids. Each event names the state of all of them, and the longest id that
a client may send back holds so many."""
_ID = re.compile(r"([^/]+)/([0-9a-f]{1,16})/([0-9a-f]{1,10})/([0-9a-f]{12})/([^/]*)/([^/]*)/([cud])")
_ORIGINS = r"(\d{1,8})-(\d{1,8})-(\d{1,8})-(\d{1,8})"
_CHOICE = re.compile(
    rf"([nsf])(\d{{1,8}})\.(\d{{1,10}})\.(\d{{1,8}})\.{_ORIGINS}\.(\d{{1,9}})\.((?:[0-9a-f]{{2}}){{0,3}})"
)


class Stage(StrEnum):
    """How far a response has come."""

    CHOICES = "c"
    USAGE = "u"
    """The usage was sent too."""
    DONE = "d"
    """Everything was sent."""


@dataclass(frozen=True, slots=True)
class EventId:
    """The content of an id."""

    request_id: str
    seed: int
    created: int
    """When the response began, in seconds since the epoch."""
    body: str
    """A hash of what the response depends on, apart from its id and seed."""
    coordinator: str = ""
    """The coordinator that began the response; empty if it is not known."""
    choices: tuple[str, ...] = ()
    """The state of each choice, see `restore`."""
    stage: Stage = Stage.CHOICES


class EventIds:
    """The ids of the events of one response. The client sends one of them back to get what follows its event.

    The events of a response with more than `MOST_CHOICES` choices have none.
    """

    def __init__(self, last: EventId, choices: Sequence[Choice]) -> None:
        """`last` says what was sent before, and `choices` what is sent at any time."""
        coordinator = last.coordinator if is_request_id(last.coordinator) else ""
        self._beginning = f"{last.request_id}/{last.seed:x}/{last.created:x}/{last.body}/{coordinator}/"
        self._choices = choices

    def next(self, stage: Stage) -> str:
        """Return the id of an event that is sent now; an empty text for none."""
        if len(self._choices) > MOST_CHOICES:
            return ""
        return f"{self._beginning}{','.join(map(_state, self._choices))}/{stage}"


def parse_event_id(text: str) -> EventId:
    """Return the content of an id that a client sent. Raises `InvalidRequest` (`Last-Event-ID`)."""
    match = _ID.fullmatch(text) if len(text) <= MAX_ID_CHARS else None
    if match is None or not is_request_id(match[1]):
        raise InvalidRequest(HEADER, text, "the id of an event of this server")
    if match[5] and not is_request_id(match[5]):
        raise InvalidRequest(HEADER, match[5], "the id of an event of this server")
    choices = tuple(match[6].split(","))
    return EventId(match[1], int(match[2], 16), int(match[3], 16), match[4], match[5], choices, Stage(match[7]))


def body_digest(requests: Sequence[generation_pb2.GenerateRequest], *values: object) -> str:
    """Return a hash of what a response depends on, apart from the id and the seed that the server draws."""
    digest = blake2b(repr(values).encode(), digest_size=6)
    for request in requests:
        content = generation_pb2.GenerateRequest()
        content.CopyFrom(request)
        content.ClearField("request_id")
        content.sampling.ClearField("seed")
        digest.update(content.SerializeToString(deterministic=True))
    return digest.hexdigest()


def restore(last: EventId, choices: Sequence[Choice], requests: Sequence[generation_pb2.GenerateRequest]) -> None:
    """Continue a response: set the state of the choices, and what the requests resume after.

    Raises `InvalidRequest` (`Last-Event-ID`).
    """
    if len(last.choices) != len(choices):
        raise InvalidRequest(HEADER, f"{len(last.choices)} choices", f"an id with {len(choices)} choices")
    per_request = len(choices) // len(requests)
    for request in requests:
        request.coordinator = last.coordinator
    for choice, state in zip(choices, last.choices, strict=True):
        match = _CHOICE.fullmatch(state)
        if match is None:
            raise InvalidRequest(HEADER, state, "the id of an event of this server")
        kind, (tokens, drafted, accepted, *counts, length) = match[1], map(int, match.groups()[1:9])
        origins = common_pb2.OriginCounts(**dict(zip(ORIGIN_NAMES.values(), counts, strict=True)))
        choice.is_started = kind != "n"
        choice.received, choice.drafted, choice.accepted = tokens, drafted, accepted
        choice.origins.CopyFrom(origins)
        choice.text_length = length
        choice.utf8.setstate((bytes.fromhex(match[10]), 0))
        if kind == "f":
            usage = generation_pb2.Usage(
                completion_tokens=tokens,
                drafted_tokens=drafted,
                accepted_draft_tokens=accepted,
                accepted_by_origin=origins,
            )
            choice.finished = generation_pb2.GenerationFinished(usage=usage)
        requests[choice.index // per_request].resume.add(
            index=choice.index % per_request,
            token_count=tokens,
            finished=kind == "f",
            drafted_tokens=drafted,
            accepted_draft_tokens=accepted,
            target_steps=max(0, tokens - accepted),  # each step adds one token of the target's own
            accepted_by_origin=origins,
        )


def _state(choice: Choice) -> str:
    kind = "f" if choice.finished is not None else "s" if choice.is_started else "n"
    incomplete = choice.utf8.getstate()[0].hex()
    origins = "-".join(map(str, origins_as_json(choice.origins).values()))
    return f"{kind}{choice.received}.{choice.drafted}.{choice.accepted}.{origins}.{choice.text_length}.{incomplete}"
