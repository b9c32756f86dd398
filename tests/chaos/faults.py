"""Faults at random moments: processes are killed, stopped for ever or for a moment, and messages are disturbed."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections import Counter
from collections.abc import Sequence

from tests.chaos.cluster import ChaosCluster, Slot
from tests.chaos.doors import can_resume
from tests.support.clusters.faulty_link import UNDISTURBED, FaultRates

logger = logging.getLogger(__name__)

KILL, FREEZE, PAUSE = "killed", "frozen", "paused"
"""SIGKILL; SIGSTOP until the process is replaced; SIGSTOP and SIGCONT."""
WEIGHTS = {KILL: 6, FREEZE: 3, PAUSE: 1}
DISTURBED = FaultRates(drop=0.002, delay=0.05, repeat=0.05, cut=0.002, longest_delay=0.2)
"""Rates while messages are disturbed."""
DISTURBED_SHARE = 0.3
"""Share of the time in which the messages of a link are disturbed."""


class Disturber:
    """Draws faults from a seed and applies them."""

    def __init__(self, cluster: ChaosCluster, seed: int, pause_seconds: float, most_lost: int) -> None:
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
                await asyncio.sleep(self._draw.expovariate(1 / self._pause_seconds))
                self._disturb_links()
                await self._apply(await self._victim(kinds))
                self._cluster.check()
        finally:
            for link in self._cluster.links:
                link.rates = UNDISTURBED

    def _disturb_links(self) -> None:
        doors = () if can_resume() else self._cluster.doors
        link = self._draw.choice([link for link in self._cluster.links if link not in doors])
        link.rates = DISTURBED if self._draw.random() < DISTURBED_SHARE else UNDISTURBED

    async def _victim(self, kinds: Sequence[str]) -> Slot:
        """A process that serves. Waits while as many as `most_lost` do not: streams would not progress any more."""
        while True:
            slots = self._cluster.slots
            lost = [slot for slot in slots if not self._serves(slot)]
            candidates = [slot for slot in slots if self._serves(slot) and (not kinds or slot.kind in kinds)]
            if candidates and len(lost) <= self._most_lost:
                kind = self._draw.choice(sorted({slot.kind for slot in candidates}))
                return self._draw.choice([slot for slot in candidates if slot.kind == kind])
            await asyncio.sleep(0.05)
            self._cluster.check()

    def _serves(self, slot: Slot) -> bool:
        return slot.is_ready and slot.process is not None and slot.process.pid not in self._hit

    async def _apply(self, slot: Slot) -> None:
        process = slot.process
        if process is None:
            return
        (fault,) = self._draw.choices(list(WEIGHTS), WEIGHTS.values())
        self.counts[slot.kind, fault] += 1
        logger.info("%s (%d) is %s", slot.name, process.pid, fault)
        process.signal(signal.SIGKILL if fault == KILL else signal.SIGSTOP)
        if fault != PAUSE:
            self._hit.add(process.pid)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(self._draw.uniform(0.1, 2.0), process.signal, signal.SIGCONT)
