"""Asking a running server over gRPC, with the time of every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cluster.wire.clients import GenerationClient
from deploy.frontend import fixed
from pilotfish.v1 import common_pb2, generation_pb2

PATIENCE_SECONDS = 3600.0


@dataclass
class Answer:
    """One answer, and when its tokens came. Times on `time.perf_counter`."""

    asked_at: float
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """One per token."""
    steps: int = 0
    """Forward passes of the target that decided tokens."""

    @property
    def first_token_seconds(self) -> float:
        """From the question to its first token."""
        return self.arrivals[0] - self.asked_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between a token and the one before."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass
class Answers:
    """All answers of one run, in the prompts' order."""

    each: list[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.tokens) for answer in self.each)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[GenerationClient]:
    """A client of the server at `address`."""
    client = GenerationClient(fixed(address))
    try:
        yield client
    finally:
        await client.close()


async def ask(client: GenerationClient, prompt: Sequence[int], tokens: int, into: list[Answer] | None = None) -> Answer:
    """A greedy answer of exactly `tokens` tokens; put into `into` at once, for who means to cancel it."""
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParameters(temperature=0.0),
        stopping=generation_pb2.StoppingCriteria(max_tokens=tokens, ignore_eos=True),
    )
    answer = Answer(time.perf_counter())
    if into is not None:
        into.append(answer)
    async for response in client.generate(request, PATIENCE_SECONDS):
        now = time.perf_counter()
        answer.tokens.extend(response.delta.token_ids)
        answer.arrivals.extend([now] * len(response.delta.token_ids))
        if response.HasField("finished"):
            answer.steps = response.finished.usage.target_steps
    return answer


async def ask_all(address: str, prompts: Sequence[Sequence[int]], tokens: int, batch: int) -> Answers:
    """Greedy answers to all prompts, `batch` in flight, over one connection."""
    places = asyncio.Semaphore(batch)

    async with connected(address) as client:

        async def one(prompt: Sequence[int]) -> Answer:
            async with places:
                return await ask(client, prompt, tokens)

        begun = time.perf_counter()
        each = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return Answers(list(each), time.perf_counter() - begun)
