"""How far the stream of one request has come, and the request that continues it at another coordinator."""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass, field

from cluster.core.ids import RequestId, scoped_request_id
from cluster.wire.origin_counts import count_origins
from cluster.wire.request_values import draw_seed
from pilotfish.v1 import common_pb2, generation_pb2


@dataclass(slots=True)
class _AnswerProgress:
    """What was received of one answer."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    has_all: bool = True
    """Whether `tokens` are all tokens received; false if the caller resumed without them."""
    count: int = 0
    is_finished: bool = False
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    origins: common_pb2.OriginCounts = field(default_factory=common_pb2.OriginCounts)
    """Where the accepted draft tokens came from."""

    def add(self, delta: generation_pb2.GenerationDelta) -> None:
        tokens = delta.token_ids
        if self.has_all:
            self.tokens.extend(tokens)
        self.count += len(tokens)
        self.drafted += delta.drafted_tokens
        self.accepted += delta.accepted_draft_tokens
        count_origins(self.origins, delta.accepted_origins)
        self.steps += bool(tokens)

    def message(self, index: int) -> generation_pb2.ResumedAnswer:
        return generation_pb2.ResumedAnswer(
            index=index,
            token_count=self.count,
            token_ids=self.tokens if self.has_all else (),
            finished=self.is_finished,
            drafted_tokens=self.drafted,
            accepted_draft_tokens=self.accepted,
            target_steps=self.steps,
            accepted_by_origin=self.origins,
        )


class StreamProgress:
    """The progress of one stream. It holds the tokens received, so at most the server's bound of output tokens each."""

    def __init__(self, request: generation_pb2.GenerateRequest) -> None:
        self._request = generation_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        if not request.HasField("request_id"):
            self._request.request_id = secrets.token_hex(16)
        if not request.sampling.HasField("seed"):
            self._request.sampling.seed = draw_seed()  # every coordinator then generates the same answer
        self._answers = {
            one.index: _AnswerProgress(
                array("I", one.token_ids),
                len(one.token_ids) == one.token_count,
                one.token_count,
                one.finished,
                one.drafted_tokens,
                one.accepted_draft_tokens,
                one.target_steps,
                _copied(one.accepted_by_origin),
            )
            for one in request.resume
        }
        self._started: generation_pb2.GenerateResponse | None = None
        self._is_repeated = False
        self._resumptions = 0
        self.is_held_back = request.HasField("beam_search") or request.best_of > max(1, request.n)
        """Whether the answers are sent only when all are complete. Such a request cannot be resumed in between."""

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._request.request_id

    @property
    def scoped_id(self) -> RequestId:
        """The id of the request among those of all clients."""
        return scoped_request_id(self._request.client, self._request.request_id)

    @property
    def coordinator(self) -> str:
        """The id of the coordinator that began the stream; empty before, and where nothing was sent."""
        return "" if self.is_held_back else self._request.coordinator

    @property
    def has_started(self) -> bool:
        """Whether the caller has the first event."""
        return self._started is not None

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return sum(answer.is_finished for answer in self._answers.values()) >= max(1, self._request.n)

    def message(self) -> generation_pb2.GenerateRequest:
        """Return the request to send. A repeated one continues after what was received, and ends an earlier call."""
        if not self._is_repeated:
            self._is_repeated = True
            return self._request
        self._resumptions += 1
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        del request.resume[:]
        if self.is_held_back or not self._answers:
            request.resume.add(index=0)
            return request
        request.resume.extend(answer.message(index) for index, answer in sorted(self._answers.items()))
        return request

    def receive(self, response: generation_pb2.GenerateResponse) -> generation_pb2.GenerateResponse | None:
        """Record a response. Returns what the caller gets: nothing for the start of a repeated call."""
        event = response.WhichOneof("event")
        if event == "started":
            if self._started is not None:
                return None
            self._started = response
            self._request.coordinator = response.started.coordinator
        elif event == "delta":
            self._answer(response.index).add(response.delta)
        elif event == "finished":
            self._answer(response.index).is_finished = True
            response.finished.resumptions = self._resumptions
        return response

    def restart(self) -> None:
        """Drop what was received of a request whose answers are held back, because its coordinator was lost."""
        self._answers.clear()
        self._started = None

    def aborted(self) -> list[generation_pb2.GenerateResponse]:
        """Return the ends of all answers that have not ended, for a request that was aborted."""
        prompt_tokens = 0 if self._started is None else self._started.started.prompt_tokens
        ends = []
        for index in range(max(1, self._request.n)):
            answer = self._answer(index)
            if not answer.is_finished:
                answer.is_finished = True
                usage = generation_pb2.Usage(
                    prompt_tokens=prompt_tokens,
                    completion_tokens=answer.count,
                    drafted_tokens=answer.drafted,
                    accepted_draft_tokens=answer.accepted,
                    target_steps=answer.steps,
                    accepted_by_origin=answer.origins,
                )
                is_beam = self._request.HasField("beam_search")
                seed = 0 if is_beam else (self._request.sampling.seed + index) % (1 << 64)
                end = generation_pb2.GenerationFinished(
                    reason=generation_pb2.FINISH_REASON_ABORT, usage=usage, seed=seed
                )
                ends.append(generation_pb2.GenerateResponse(finished=end, index=index))
        return ends

    def _answer(self, index: int) -> _AnswerProgress:
        answer = self._answers.get(index)
        if answer is None:
            answer = self._answers[index] = _AnswerProgress()
        return answer


def _copied(counts: common_pb2.OriginCounts) -> common_pb2.OriginCounts:
    copy = common_pb2.OriginCounts()
    copy.CopyFrom(counts)
    return copy
