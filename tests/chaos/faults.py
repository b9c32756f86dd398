"""Faults at random moments: processes are killed, stopped for ever or for a moment, and messages are disturbed."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tests.support.clusters.faulty_link import UNDISTURBED, FaultRates, FaultyLink

logger = logging.getLogger(__name__)

KILL, FREEZE, PAUSE = "killed", "frozen", "paused"
"""SIGKILL; SIGSTOP until the process is replaced; SIGSTOP and SIGCONT."""
WEIGHTS = {KILL: 6, FREEZE: 3, PAUSE: 1}
DISTURBED = FaultRates(drop=0.002, delay=0.05, repeat=0.05, cut=0.002, longest_delay=0.2)
"""Rates while messages are disturbed."""
DISTURBED_SHARE = 0.3
"""Share of the time in which the messages of a link are disturbed."""


@dataclass(frozen=True)
class Victim:
    """A process that serves."""

    name: str
    kind: str
    pid: int
    signal: Callable[[signal.Signals], None]
    """Sends a signal, unless the process has ended."""


class Disturbable(Protocol):
    """A cluster that faults are applied to."""

    links: list[FaultyLink]
    look_seconds: float
    """Pause between looks at its processes, in seconds."""

    @property
    def size(self) -> int:
        """Number of its processes while none is lost."""
        ...

    def victims(self) -> list[Victim]:
        """The processes that serve."""
        ...

    def check(self) -> None:
        """Raise the error of an owner that has failed."""
        ...


class Disturber:
    """Draws faults from a seed and applies them."""

    def __init__(self, cluster: Disturbable, seed: int, pause_seconds: float, most_lost: int) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """Number of faults by role and kind."""
        self._cluster = cluster
        self._draw = random.Random(seed)
        self._pause_seconds = pause_seconds
        self._most_lost = most_lost
        self._hit: set[int] = set()
        """Process ids that were killed, or frozen until they are replaced."""

    @property
    def total(self) -> int:
        """Number of kills and freezes."""
        return self.counts.total()

    async def run(self, rounds: int, kinds: Sequence[str] = ()) -> None:
        """Apply `rounds` faults, to roles of `kinds` if any are named. Then messages are undisturbed again."""
        try:
            for _ in range(rounds):
                await self._candidates(kinds)  # the pause begins when enough processes serve
                await asyncio.sleep(self._draw.expovariate(1 / self._pause_seconds))
                self._disturb_links()
                candidates = await self._candidates(kinds)
                kind = self._draw.choice(sorted({victim.kind for victim in candidates}))
                self._apply(self._draw.choice([victim for victim in candidates if victim.kind == kind]))
                self._cluster.check()
        finally:
            for link in self._cluster.links:
                link.rates = UNDISTURBED

    def _disturb_links(self) -> None:
        if self._cluster.links:
            link = self._draw.choice(self._cluster.links)
            link.rates = DISTURBED if self._draw.random() < DISTURBED_SHARE else UNDISTURBED

    async def _candidates(self, kinds: Sequence[str]) -> list[Victim]:
        """The processes that serve. Waits while more than `most_lost` do not: streams would not progress any more."""
        while True:
            serving = [victim for victim in self._cluster.victims() if victim.pid not in self._hit]
            candidates = [victim for victim in serving if not kinds or victim.kind in kinds]
            if candidates and self._cluster.size - len(serving) <= self._most_lost:
                return candidates
            await asyncio.sleep(self._cluster.look_seconds)
            self._cluster.check()

    def _apply(self, victim: Victim) -> None:
        (fault,) = self._draw.choices(list(WEIGHTS), WEIGHTS.values())
        self.counts[victim.kind, fault] += 1
        logger.info("%s (%d) is %s", victim.name, victim.pid, fault)
        victim.signal(signal.SIGKILL if fault == KILL else signal.SIGSTOP)
        if fault != PAUSE:
            self._hit.add(victim.pid)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(self._draw.uniform(0.1, 2.0), victim.signal, signal.SIGCONT)
