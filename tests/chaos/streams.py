"""Clients that stream answers while processes die. Some leave early. Every token is compared with the model's own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.errors import PilotfishError
from tests.chaos.doors import Door, Lost, Received
from tests.soak.reference import Reference
from tests.soak.requests import SoakRequest

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 240.0
"""Deadline of a request. Longer than any answer takes, so that a hang becomes a failure."""
RETRY_SECONDS = 0.1
LEAVE_SHARE = 0.1
"""Share of the requests whose client leaves early."""
MAX_SHOWN = 20
SLOW_SECONDS = 15.0
"""Longer pauses are logged."""


@dataclass
class StreamResults:
    """What the clients saw."""

    complete: int = 0
    left: int = 0
    """Streams whose client left early."""
    resumed: int = 0
    """How often a client continued a stream after a lost connection."""
    tokens: int = 0
    differences: int = 0
    near: int = 0
    """Answers that differ where two scores are closer than rounding."""
    errors: Counter[str] = field(default_factory=Counter)
    """Streams that ended with an error, by error."""
    pauses: list[float] = field(default_factory=list)
    """The longest time without a token of each complete stream, in seconds."""
    shown: list[str] = field(default_factory=list)
    """Descriptions of the first differences and errors."""

    def show(self, text: str) -> None:
        """Keep a description, up to `MAX_SHOWN`."""
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(text)


class Streams:
    """`at_once` clients. Each draws its requests, and the kind of door that it uses, from a seed of its own.

    A client whose connection is lost continues at another door of the same kind. Between two requests it pauses.
    """

    def __init__(
        self,
        doors: Sequence[Sequence[Door]],
        requests: Sequence[SoakRequest],
        reference: Reference,
        at_once: int,
        seed: int,
        *,
        pause_seconds: float = 0.0,
    ) -> None:
        self.results = StreamResults()
        self._doors = doors
        self._requests = requests
        self._reference = reference
        self._at_once = at_once
        self._seed = seed
        self._pause_seconds = pause_seconds
        self._numbers = itertools.count()
        self._is_ending = False

    async def run(self) -> None:
        """Send requests until `end()`, then return when the last stream has ended."""
        self._is_ending = False
        draws = [random.Random(f"{self._seed}/{index}") for index in range(self._at_once)]
        await asyncio.gather(*(self._one_client(draw) for draw in draws))

    def end(self) -> None:
        """Send no new requests."""
        self._is_ending = True

    async def _one_client(self, draw: random.Random) -> None:
        while not self._is_ending:
            leaves_after = draw.expovariate(2.0) if draw.random() < LEAVE_SHARE else None
            await self._stream(draw.choice(self._requests), draw, leaves_after)
            await asyncio.sleep(self._pause_seconds)

    async def _stream(self, request: SoakRequest, draw: random.Random, leaves_after: float | None) -> None:
        results, name = self.results, f"chaos-{next(self._numbers)}"
        received = Received({index: [] for index in range(request.n)})
        reading = asyncio.create_task(self._read(name, request, received, draw))
        has_left = False
        try:
            if leaves_after is not None and not (await asyncio.wait([reading], timeout=leaves_after))[0]:
                has_left = True
                reading.cancel()
            async with asyncio.timeout(ANSWER_SECONDS + 30.0):
                await asyncio.gather(reading, return_exceptions=has_left)
        except (PilotfishError, Lost, OSError) as error:
            results.errors[type(error).__name__] += 1
            results.show(f"{name}: {error!r} after {sum(map(len, received.answers.values()))} tokens")
            has_left = True
        else:
            if has_left:
                results.left += 1
            else:
                results.complete += 1
                results.pauses.append(received.pause)
                if received.pause > SLOW_SECONDS:
                    logger.info("%s over %s paused for %.1f s", name, received.door, received.pause)
        for index, answer in received.answers.items():
            results.tokens += len(answer)
            self._check(name, request, index, answer, whole=not has_left)

    async def _read(self, name: str, request: SoakRequest, received: Received, draw: random.Random) -> None:
        """Read the answers at one door after another."""
        end = time.monotonic() + ANSWER_SECONDS
        doors = draw.choice(self._doors)
        first = draw.randrange(len(doors))
        for attempt in itertools.count():
            left = end - time.monotonic()
            try:
                await doors[(first + attempt) % len(doors)].read(name, request, received, left)
                return
            except Lost:
                if time.monotonic() > end:
                    raise
                self.results.resumed += received.has_begun
                await asyncio.sleep(RETRY_SECONDS)

    def _check(self, name: str, request: SoakRequest, index: int, answer: list[int], *, whole: bool) -> None:
        own = self._reference.answers(request)[index]
        if tuple(answer) == (own if whole else own[: len(answer)]):
            return
        if self._reference.is_near(request, index, answer):
            self.results.near += 1
            return
        self.results.differences += 1
        self.results.show(f"{name} (answer {index}): {answer}\n  instead of {list(own)}\n  {request}")
