"""Requests of all kinds, and all that a client receives of their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from cluster.ingress.client import ServiceClient
from pilotfish.v1 import common_pb2, generation_pb2

TIMEOUT_SECONDS = 120.0
"""Turns a hang into a failure. No test waits this long."""
KINDS = ("greedy", "sampled", "penalties", "logprobs", "stop", "several", "best", "beams")


def request_of(kind: str, number: int, max_tokens: int = 30) -> generation_pb2.GenerateRequest:
    """A request. `number` chooses prompt and seed."""
    sampling = common_pb2.SamplingParameters(temperature=1.0, seed=1000 + number)
    stopping = generation_pb2.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True)
    request = generation_pb2.GenerateRequest(
        request_id=f"{kind}-{number}", text=f"prompt {number} " * (1 + number % 5), sampling=sampling, stopping=stopping
    )
    match kind:
        case "greedy":
            request.sampling.temperature = 0.0
        case "penalties":
            request.sampling.repetition_penalty = 1.3
            request.sampling.frequency_penalty = 0.4
        case "logprobs":
            request.sampling.logprobs = 2
        case "stop":
            request.stopping.stop.extend(["he", "a", "b", "\n"])
        case "several":
            request.n = 2
        case "best":
            request.best_of = 2
        case "beams":
            request.n, request.best_of = 2, 2
            request.beam_search.length_penalty = 1.0
            request.stopping.max_tokens = 8
    return request


@dataclass
class RoutedAnswer:
    """All that a client received of one answer, apart from how it was split into messages."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float, tuple[int, ...]]] = field(default_factory=list)
    end: tuple[int, str, int, int, int] | None = None

    def add(self, response: generation_pb2.GenerateResponse) -> None:
        assert self.end is None
        if response.HasField("delta"):
            delta = response.delta
            self.text += delta.text
            self.tokens += delta.token_ids
            self.logprobs += [
                (one.token_id, one.logprob, tuple(top.token_id for top in one.top)) for one in delta.logprobs
            ]
        else:
            end, usage = response.finished, response.finished.usage
            counts = (usage.prompt_tokens, usage.completion_tokens)
            self.end = (end.reason, end.stop_string, end.stop_token_id, *counts)


async def answers_of(client: ServiceClient, request: generation_pb2.GenerateRequest) -> list[RoutedAnswer]:
    """Read a whole stream. It starts once, with the request's id and seed."""
    return await collect(client.generate(request, TIMEOUT_SECONDS), request)


async def collect(
    responses: AsyncIterator[generation_pb2.GenerateResponse], request: generation_pb2.GenerateRequest
) -> list[RoutedAnswer]:
    """Read a whole stream."""
    answers = [RoutedAnswer() for _ in range(request.n or 1)]
    starts = 0
    async for response in responses:
        if response.HasField("started"):
            starts += 1
            started = response.started
            assert (started.request_id, started.seed) == (request.request_id, request.sampling.seed)
        else:
            answers[response.index].add(response)
    assert starts == 1
    assert all(answer.end is not None for answer in answers)
    return answers
