"""Asking a running server over gRPC, with the time of every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cluster.wire.generation_client import GenerationClient
from deploy.coordinator_server import fixed_address
from pilotfish.v1 import common_pb2, generation_pb2

TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class RequestOptions:
    """How to ask; answers are greedy and of full length unless it says otherwise."""

    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = True
    max_draft_tokens: int | None = None
    """0 asks for plain decoding."""


@dataclass
class Answer:
    """One answer, and when its tokens came. Times on `time.perf_counter`."""

    asked_at: float
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """One per token."""
    steps: int = 0
    """Forward passes of the target that decided tokens."""
    first_tokens: int = 0
    """Tokens that came at once with the first."""
    is_lossless: bool = True
    """Whether the server says that it is what the model alone would have written."""

    @property
    def first_token_seconds(self) -> float:
        """From the question to its first token."""
        return self.arrivals[0] - self.asked_at

    @property
    def seconds(self) -> float:
        """From the question to its last token."""
        return self.arrivals[-1] - self.asked_at

    @property
    def decoding_seconds(self) -> float:
        """From its first token to its last: the prompt's time is left out."""
        return self.arrivals[-1] - self.arrivals[0]

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

    @property
    def committed_per_step(self) -> float:
        """Mean tokens that one forward pass of the target adds to an answer (τ)."""
        return self.tokens / sum(answer.steps for answer in self.each)

    @property
    def own_rate(self) -> float:
        """Tokens per second of an answer's own time, from its question on: the rate of a single reader."""
        return self.tokens / sum(answer.seconds for answer in self.each)

    @property
    def decoding_rate(self) -> float:
        """The same from the first tokens on, without the prompts' time."""
        rest = sum(len(answer.tokens) - answer.first_tokens for answer in self.each)
        return rest / max(1e-9, sum(answer.decoding_seconds for answer in self.each))

    def part(self, places: slice) -> Answers:
        """Some of the answers, by their prompts' places."""
        return Answers(self.each[places], self.seconds)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[GenerationClient]:
    """A client of the server at `address`."""
    client = GenerationClient(fixed_address(address))
    try:
        yield client
    finally:
        await client.close()


async def ask(
    client: GenerationClient,
    prompt: Sequence[int],
    tokens: int,
    into: list[Answer] | None = None,
    request_options: RequestOptions = RequestOptions(),
    seed: int = 0,
) -> Answer:
    """An answer of at most `tokens` tokens; put into `into` at once, for who means to cancel it."""
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParameters(
            temperature=request_options.temperature, top_p=request_options.top_p, seed=seed
        ),
        stopping=generation_pb2.StoppingCriteria(max_tokens=tokens, ignore_eos=request_options.ignore_eos),
        max_draft_tokens=request_options.max_draft_tokens,
    )
    answer = Answer(time.perf_counter())
    if into is not None:
        into.append(answer)
    async for response in client.generate(request, TIMEOUT_SECONDS):
        now = time.perf_counter()
        answer.is_lossless &= not response.lossy
        answer.first_tokens = answer.first_tokens or len(response.delta.token_ids)
        answer.tokens.extend(response.delta.token_ids)
        answer.arrivals.extend([now] * len(response.delta.token_ids))
        if response.HasField("finished"):
            answer.steps = response.finished.usage.target_steps
    return answer


async def ask_all(
    address: str,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    batch: int,
    request_options: RequestOptions = RequestOptions(),
) -> Answers:
    """Answers to all prompts, `batch` in flight, over one connection; each prompt's seed is its place."""
    places = asyncio.Semaphore(batch)

    async with connected(address) as client:

        async def one(seed: int, prompt: Sequence[int]) -> Answer:
            async with places:
                return await ask(client, prompt, tokens, request_options=request_options, seed=seed)

        begun = time.perf_counter()
        each = await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts)))
        return Answers(list(each), time.perf_counter() - begun)
