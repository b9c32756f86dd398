"""How far a stream has come, and the request that continues it after a lost connection."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from pilotfish.v1 import common_pb2, generation_pb2
from pilotfish_client.errors import DeadlineExceeded, PilotfishClientError, is_loss

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
_SEED_BITS = 53
"""JSON numbers hold that many bits exactly."""
_ORIGINS: dict[int, str] = {
    common_pb2.DRAFT_ORIGIN_REQUEST: "request",
    common_pb2.DRAFT_ORIGIN_EARLIER: "earlier",
    common_pb2.DRAFT_ORIGIN_TRAINED: "trained",
    common_pb2.DRAFT_ORIGIN_FORCED: "forced",
}


@dataclass(slots=True)
class _AnswerProgress:
    tokens: list[int] = field(default_factory=list)
    is_finished: bool = False
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    origins: common_pb2.OriginCounts = field(default_factory=common_pb2.OriginCounts)

    def message(self, index: int) -> generation_pb2.ResumedAnswer:
        return generation_pb2.ResumedAnswer(
            index=index,
            token_count=len(self.tokens),
            token_ids=self.tokens,
            finished=self.is_finished,
            drafted_tokens=self.drafted,
            accepted_draft_tokens=self.accepted,
            target_steps=self.steps,
            accepted_by_origin=self.origins,
        )


def _count(counts: common_pb2.OriginCounts, origin: int) -> None:
    """Count one accepted draft token. An origin that this client does not know is not counted."""
    name = _ORIGINS.get(origin)
    if name is not None:
        setattr(counts, name, getattr(counts, name) + 1)


class StreamProgress:
    """The progress of one stream: what was received, and when to try again.

    The request gets a seed and an id before it is sent, so that a repeated one asks for the same answer.
    """

    def __init__(self, request: generation_pb2.GenerateRequest) -> None:
        self._request = generation_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        if not request.HasField("request_id"):
            self._request.request_id = secrets.token_hex(16)
        if not request.sampling.HasField("seed"):
            self._request.sampling.seed = secrets.randbits(_SEED_BITS)
        self._answers: dict[int, _AnswerProgress] = {}
        self._has_started = False
        self._is_repeated = False
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self.resumptions = 0
        """How often the request was sent again."""

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return sum(answer.is_finished for answer in self._answers.values()) >= max(1, self._request.n)

    def message(self) -> generation_pb2.GenerateRequest:
        """The request to send. A repeated one continues after what was received, and ends an earlier call."""
        if not self._is_repeated:
            self._is_repeated = True
            return self._request
        self.resumptions += 1
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        del request.resume[:]
        request.resume.extend(answer.message(index) for index, answer in sorted(self._answers.items()))
        if not self._answers:
            request.resume.add(index=0)
        return request

    def receive(self, response: generation_pb2.GenerateResponse) -> bool:
        """Record a response. Returns whether it is new to the reader: the start of a repeated call is not."""
        self._pause_seconds = FIRST_PAUSE_SECONDS
        answer = self._answers.setdefault(response.index, _AnswerProgress())
        match response.WhichOneof("event"):
            case "started":
                self._request.coordinator = response.started.coordinator
                is_new, self._has_started = not self._has_started, True
                return is_new
            case "delta":
                answer.tokens.extend(response.delta.token_ids)
                answer.drafted += response.delta.drafted_tokens
                answer.accepted += response.delta.accepted_draft_tokens
                for origin in response.delta.accepted_origins:
                    _count(answer.origins, origin)
                answer.steps += bool(response.delta.token_ids)
            case "finished":
                answer.is_finished = True
        return True

    def pause(self, error: PilotfishClientError, seconds_left: float, patience_seconds: float) -> float:
        """Seconds to wait before the request is sent again.

        Raises `error` if that would not help, and `DeadlineExceeded`. A request that has not started waits no longer
        than the patience.
        """
        if not is_loss(error, has_started=self._has_started) or (not self._has_started and patience_seconds <= 0):
            raise error
        if seconds_left <= 0:
            raise DeadlineExceeded(f"the time of the call passed while no server continued it: {error}") from error
        seconds = min(self._pause_seconds, seconds_left)
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        return seconds
