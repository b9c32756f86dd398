"""Sends requests to a running server over gRPC and records the arrival time of every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from pilotfish.v1 import common_pb2, generation_pb2

TIMEOUT_SECONDS = 3600.0


@dataclass
class Answer:
    """One answer and the arrival times of its tokens, on `time.perf_counter`."""

    asked_at: float
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each token."""
    steps: int = 0
    """Number of target steps that decided tokens of the answer."""
    first_tokens: int = 0
    """Number of tokens that arrived together with the first one."""

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the request to the first token."""
        return self.arrivals[0] - self.asked_at

    @property
    def seconds(self) -> float:
        """Seconds from the request to the last token."""
        return self.arrivals[-1] - self.asked_at

    @property
    def decoding_seconds(self) -> float:
        """Seconds from the first token to the last, without the time of the prompt."""
        return self.arrivals[-1] - self.arrivals[0]

    @property
    def gaps(self) -> list[float]:
        """Seconds between each token and the one before."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass
class Answers:
    """All answers of one run, in the order of the prompts."""

    each: list[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        """Number of tokens in all answers."""
        return sum(len(answer.tokens) for answer in self.each)

    @property
    def rate(self) -> float:
        """Tokens per second of the whole run."""
        return self.tokens / self.seconds

    @property
    def committed_per_step(self) -> float:
        """Mean tokens that one forward pass of the target adds to an answer (τ)."""
        return self.tokens / sum(answer.steps for answer in self.each)

    @property
    def decoding_rate(self) -> float:
        """Tokens per second of a single reader after the first tokens, without the time of the prompts."""
        later = sum(len(answer.tokens) - answer.first_tokens for answer in self.each)
        return later / max(1e-9, sum(answer.decoding_seconds for answer in self.each))


def connected(address: str) -> GenerationClient:
    """A client of the server at `address`, which `async with` closes."""
    return GenerationClient(fixed_address(address))


async def ask(
    client: GenerationClient,
    prompt: Sequence[int],
    tokens: int,
    into: list[Answer] | None = None,
    max_draft_tokens: int | None = None,
    seed: int = 0,
) -> Answer:
    """A greedy answer of `tokens` tokens; with `max_draft_tokens` 0, by plain decoding.

    It is appended to `into` before it starts, so that it survives a cancel.
    """
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParameters(temperature=0.0, seed=seed),
        stopping=generation_pb2.StoppingCriteria(max_tokens=tokens, ignore_eos=True),
        max_draft_tokens=max_draft_tokens,
    )
    answer = Answer(time.perf_counter())
    if into is not None:
        into.append(answer)
    async for response in client.generate(request, TIMEOUT_SECONDS):
        now = time.perf_counter()
        answer.first_tokens = answer.first_tokens or len(response.delta.token_ids)
        answer.tokens.extend(response.delta.token_ids)
        answer.arrivals.extend([now] * len(response.delta.token_ids))
        if response.HasField("finished"):
            answer.steps = response.finished.usage.target_steps
    return answer


async def ask_all(
    address: str, prompts: Sequence[Sequence[int]], tokens: int, batch: int, max_draft_tokens: int | None = None
) -> Answers:
    """Answers to all prompts, `batch` in flight, over one connection. The seed of a prompt is its index."""
    slots = asyncio.Semaphore(batch)

    async with connected(address) as client:

        async def one(seed: int, prompt: Sequence[int]) -> Answer:
            async with slots:
                return await ask(client, prompt, tokens, max_draft_tokens=max_draft_tokens, seed=seed)

        begun = time.perf_counter()
        each = await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts)))
        return Answers(list(each), time.perf_counter() - begun)
