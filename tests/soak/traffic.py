"""Clients that ask, read, leave in the middle, and compare every token with what the model alone would write."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from cluster.core.errors import PilotfishError
from cluster.wire.generation_client import GenerationClient
from pilotfish.v1 import generation_pb2
from tests.soak.asks import Ask
from tests.soak.reference import Reference

ANSWER_SECONDS = 300.0
"""No answer takes this long; it only turns a hang into a failure."""
MOST_COMPLAINTS = 20
LEAVE, ABORT = "left", "aborted"


@dataclass
class Findings:
    """What came of it all."""

    ended: Counter[str] = field(default_factory=Counter)
    """Requests by kind, and by how they ended early."""
    tokens: int = 0
    wrong: int = 0
    near: int = 0
    """Answers that differ where two tokens' scores are closer than rounding."""
    failed: int = 0
    complaints: list[str] = field(default_factory=list)

    def complain(self, text: str) -> None:
        """The first few are kept in words."""
        if len(self.complaints) < MOST_COMPLAINTS:
            self.complaints.append(text)

    @property
    def is_clean(self) -> bool:
        """Whether every answer was right."""
        return not self.wrong and not self.failed


class Traffic:
    """`at_once` clients over one connection. Each draws its requests, and its moods, from a seed of its own."""

    def __init__(
        self, client: GenerationClient, asks: tuple[Ask, ...], reference: Reference, at_once: int, seed: int
    ) -> None:
        self.findings = Findings()
        self._client = client
        self._asks = asks
        self._reference = reference
        self._at_once = at_once
        self._seed = seed
        self._numbers = itertools.count()

    async def run(self, seconds: float, pauses: float = 0.05) -> None:
        """Return when the last answer that was begun within `seconds` has ended.

        After that share of their requests, clients pause for a while: sometimes the house is nearly empty.
        """
        end = time.monotonic() + seconds
        draws = [random.Random(f"{self._seed}/{index}") for index in range(self._at_once)]
        await asyncio.gather(*(self._one_client(draw, end, pauses) for draw in draws))

    async def _one_client(self, draw: random.Random, end: float, pauses: float) -> None:
        while time.monotonic() < end:
            asked = draw.choice(self._asks)
            mood = draw.choices((None, LEAVE, ABORT), weights=(80, 15, 5))[0]
            await self._request(asked, mood, draw.expovariate(4.0))
            if draw.random() < pauses:
                await asyncio.sleep(draw.uniform(0.0, 2.0))

    async def _request(self, asked: Ask, mood: str | None, patience: float) -> None:
        """Ask, and after `patience` seconds act on the mood. Whatever came by then must be right."""
        findings = self.findings
        name = f"soak-{next(self._numbers)}"
        answers: dict[int, list[int]] = {index: [] for index in range(asked.n)}
        reading = asyncio.create_task(self._read(asked.message(name), answers))
        ended_early = None
        try:
            if mood is not None and not (await asyncio.wait([reading], timeout=patience))[0]:
                ended_early = mood
                if mood == LEAVE:
                    reading.cancel()
                else:
                    await self._client.abort(name)
            async with asyncio.timeout(ANSWER_SECONDS):
                await asyncio.gather(reading, return_exceptions=ended_early == LEAVE)
        except (PilotfishError, TimeoutError) as error:
            findings.failed += 1
            findings.complain(f"{name} ({asked.kind}): {error!r}")
        else:
            findings.ended[ended_early or asked.kind] += 1
            for index, answer in answers.items():
                findings.tokens += len(answer)
                self._check(name, asked, index, answer, whole=ended_early is None)

    async def _read(self, request: generation_pb2.GenerateRequest, answers: dict[int, list[int]]) -> None:
        async for response in self._client.generate(request, ANSWER_SECONDS):
            if response.HasField("delta"):
                answers[response.index].extend(response.delta.token_ids)

    def _check(self, name: str, asked: Ask, index: int, answer: list[int], *, whole: bool) -> None:
        own = self._reference.answers(asked)[index]
        if tuple(answer) == (own if whole else own[: len(answer)]):
            return
        if self._reference.is_near(asked, index, answer):
            self.findings.near += 1
            return
        self.findings.wrong += 1
        self.findings.complain(f"{name} ({asked.kind}, answer {index}): {answer}\n  instead of {list(own)}\n  {asked}")
