"""What one pass over prompts records: the tokens of each answer, the arrival of each commit, the draft counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from cluster.core.config.base import Section


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of a task."""

    tokens: tuple[int, ...]
    """The conversation, rendered by the target's chat template. Empty for an endpoint, which renders its own."""
    text: str
    """The user's message."""
    prediction: str = ""
    """Text that the answer is expected to repeat; empty: the user's message."""


BenchTasks = dict[str, tuple[BenchPrompt, ...]]
"""The prompts of each task."""


class RequestOptions(Section):
    """What a competitor changes in every request."""

    beams: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of beams of a beam search; 1 samples."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 1.0
    """Exponent of the length in the score of a beam search."""
    reuses_cache: bool = False
    """Whether all passes share stored KV blocks and texts. Otherwise each pass has a salt of its own."""

    @property
    def name(self) -> str:
        """For tables; empty for the defaults."""
        parts = [f"{self.beams} beams, length penalty {self.length_penalty:g}"] if self.beams > 1 else []
        return ", ".join([*parts, *(["prompts in the prefix cache"] if self.reuses_cache else [])])


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that arrived together: one commit of the target."""

    seconds: float
    """Time since the request was sent, in seconds."""
    tokens: int
    accepted: int = 0
    """How many of the tokens are accepted draft tokens."""


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """One answer."""

    tokens: tuple[int, ...]
    """Empty where an endpoint reports no token ids."""
    arrivals: tuple[Arrival, ...]
    completion_tokens: int
    drafted: int = 0
    """Draft tokens that were verified."""
    steps: int = 0
    """Forward passes of the target that decided tokens; 0 where they are unknown."""
    is_lossless: bool = True
    text: str = ""
    prompt_tokens: int = 0
    """Tokens of the prompt; 0 where they are unknown."""
    cached_tokens: int = 0
    """Tokens of the prompt whose KV was stored before."""
    accepted_by_origin: Mapping[str, int] = field(default_factory=dict)
    """Where the accepted draft tokens come from: `request`, `earlier`, `trained` or `forced`. Empty if unknown."""

    @property
    def seconds(self) -> float:
        """Time from the request to the last token, in seconds."""
        return self.arrivals[-1].seconds if self.arrivals else 0.0

    @property
    def first_token_seconds(self) -> float | None:
        """Time from the request to the first token (TTFT), in seconds; `None` for an empty answer."""
        return self.arrivals[0].seconds if self.arrivals else None

    @property
    def seconds_per_token(self) -> float | None:
        """Time per output token after the first commit (TPOT), in seconds; `None` if nothing came after it."""
        later = self.completion_tokens - (self.arrivals[0].tokens if self.arrivals else 0)
        return (self.seconds - self.arrivals[0].seconds) / later if later > 0 else None


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """What the measured processes used during a pass."""

    cpu_seconds: float | None = None
    """CPU time of all measured processes; `None` where they are on another machine."""
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Largest resident memory of each process, by its name and id."""
    joules: float | None = None
    """Energy that the devices report; `None` where they report none."""


@dataclass(frozen=True, slots=True)
class BenchPass:
    """One pass through the prompts of a task, with a number of requests in flight."""

    answers: tuple[BenchAnswer, ...]
    seconds: float
    counters: Mapping[str, float] = field(default_factory=dict)
    """Increase of the coordinator's counters during the pass (see `deploy.bench.contestants.local`)."""
    resources: ResourceUse = field(default_factory=ResourceUse)

    @property
    def tokens(self) -> int:
        """Number of tokens in all answers."""
        return sum(answer.completion_tokens for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens per second of the whole pass; 0 for a pass that took no time."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class PassRequest:
    """What a pass asks for."""

    prompts: Sequence[BenchPrompt]
    batch: int
    """Requests in flight."""
    temperature: float
    seed: int
    """Seed of the first prompt; the seed of each next prompt is one higher."""
    max_tokens: int
    salt: str = ""
    """Separates the pass from all others: no KV block and no stored text of another pass is reused."""


async def answer_pass(
    request: PassRequest, answer: Callable[[PassRequest, BenchPrompt, int], Awaitable[BenchAnswer]]
) -> BenchPass:
    """Answer the prompts of a pass, `request.batch` at a time; `answer` gets the pass, a prompt and its seed."""
    slots = asyncio.Semaphore(request.batch)

    async def one(index: int, prompt: BenchPrompt) -> BenchAnswer:
        async with slots:
            return await answer(request, prompt, request.seed + index)

    begun = time.perf_counter()
    answers = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(request.prompts)))
    return BenchPass(tuple(answers), time.perf_counter() - begun)
