"""Clients that send requests, sometimes disconnect early, and compare every token with the model's own answer."""

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
from tests.soak.reference import Reference
from tests.soak.requests import SoakRequest

ANSWER_SECONDS = 300.0
"""Seconds. Longer than any answer takes, so that a hang becomes a failure."""
MAX_ERRORS = 20
LEAVE, ABORT = "left", "aborted"


@dataclass
class Findings:
    """The results of all requests."""

    ended: Counter[str] = field(default_factory=Counter)
    """Number of requests by kind, or by how they ended early."""
    tokens: int = 0
    wrong: int = 0
    near: int = 0
    """Number of answers that differ where two scores are closer than rounding."""
    failed: int = 0
    errors: list[str] = field(default_factory=list)

    def add_error(self, text: str) -> None:
        """Store the description of an error, up to `MAX_ERRORS`."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(text)

    @property
    def is_clean(self) -> bool:
        """Whether every answer was right and no request failed."""
        return not self.wrong and not self.failed


class Traffic:
    """`at_once` clients over one connection. Each draws its requests and early ends from a different seed."""

    def __init__(
        self, client: GenerationClient, requests: tuple[SoakRequest, ...], reference: Reference, at_once: int, seed: int
    ) -> None:
        self.findings = Findings()
        self._client = client
        self._requests = requests
        self._reference = reference
        self._at_once = at_once
        self._seed = seed
        self._numbers = itertools.count()

    async def run(self, seconds: float, pauses: float = 0.05) -> None:
        """Send requests for `seconds` and return when the last answer has ended.

        After a share `pauses` of their requests, clients pause for a while, so that the server is sometimes idle.
        """
        end = time.monotonic() + seconds
        draws = [random.Random(f"{self._seed}/{index}") for index in range(self._at_once)]
        await asyncio.gather(*(self._one_client(draw, end, pauses) for draw in draws))

    async def _one_client(self, draw: random.Random, end: float, pauses: float) -> None:
        while time.monotonic() < end:
            request = draw.choice(self._requests)
            early_end = draw.choices((None, LEAVE, ABORT), weights=(80, 15, 5))[0]
            await self._request(request, early_end, draw.expovariate(4.0))
            if draw.random() < pauses:
                await asyncio.sleep(draw.uniform(0.0, 2.0))

    async def _request(self, request: SoakRequest, early_end: str | None, early_end_seconds: float) -> None:
        """Send a request and check the tokens that arrive. With `early_end`, end it after `early_end_seconds`."""
        findings = self.findings
        name = f"soak-{next(self._numbers)}"
        answers: dict[int, list[int]] = {index: [] for index in range(request.n)}
        reading = asyncio.create_task(self._read(request.message(name), answers))
        ended_early = None
        try:
            if early_end is not None and not (await asyncio.wait([reading], timeout=early_end_seconds))[0]:
                ended_early = early_end
                if early_end == LEAVE:
                    reading.cancel()
                else:
                    await self._client.abort(name)
            async with asyncio.timeout(ANSWER_SECONDS):
                await asyncio.gather(reading, return_exceptions=ended_early == LEAVE)
        except (PilotfishError, TimeoutError) as error:
            findings.failed += 1
            findings.add_error(f"{name} ({request.kind}): {error!r}")
        else:
            findings.ended[ended_early or request.kind] += 1
            for index, answer in answers.items():
                findings.tokens += len(answer)
                self._check(name, request, index, answer, whole=ended_early is None)

    async def _read(self, request: generation_pb2.GenerateRequest, answers: dict[int, list[int]]) -> None:
        async for response in self._client.generate(request, ANSWER_SECONDS):
            if response.HasField("delta"):
                answers[response.index].extend(response.delta.token_ids)

    def _check(self, name: str, request: SoakRequest, index: int, answer: list[int], *, whole: bool) -> None:
        own = self._reference.answers(request)[index]
        if tuple(answer) == (own if whole else own[: len(answer)]):
            return
        if self._reference.is_near(request, index, answer):
            self.findings.near += 1
            return
        self.findings.wrong += 1
        self.findings.add_error(
            f"{name} ({request.kind}, answer {index}): {answer}\n  instead of {list(own)}\n  {request}"
        )
