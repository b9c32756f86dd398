"""A cluster of processes: targets with their ranks and coordinators, and drafters that all coordinators share.

An owner replaces each process that has ended, is frozen, or is unhealthy, as Ray and Serve do. Messages between
processes pass links that may disturb them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.core.config.sections import Configuration
from tests.chaos.faults import Victim
from tests.support.clusters.faulty_link import FaultyLink
from tests.support.clusters.role_main import LOOPBACK, RoleKind, RoleSpec
from tests.support.clusters.role_process import START_SECONDS, RoleProcess
from workers.serve.node import free_port

logger = logging.getLogger(__name__)


@dataclass
class Slot:
    """A role of the cluster. One process after another fills it."""

    name: str
    kind: RoleKind
    spec: RoleSpec
    log: Path
    process: RoleProcess | None = None
    address: str = ""
    """The address of the process that serves; empty while none does."""
    http_url: str = ""
    """The URL of its HTTP API, if it has one."""
    is_ready: bool = False
    starts: int = 0

    async def resolve(self) -> str:
        """The address of the process. Raises `ConnectionError` while there is none."""
        if not self.address:
            raise ConnectionError(f"{self.name} is not serving")
        return self.address


@dataclass
class Replacements:
    """How often and how fast lost processes were replaced."""

    reasons: list[tuple[str, str]] = field(default_factory=list)
    """The kind of each lost process, and why it counted as lost."""
    seconds: list[float] = field(default_factory=list)
    """Times from the notice of a loss until the new processes serve."""


class Owner:
    """Keeps the processes of one or several slots running. They are replaced together, like the ranks of a group."""

    def __init__(self, slots: Sequence[Slot], replacements: Replacements) -> None:
        self.slots = tuple(slots)
        self._replacements = replacements
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once all processes serve for the first time."""
        await self._launch()
        self._task = asyncio.create_task(self._supervise(), name=f"owner of {self.slots[0].name}")

    async def stop(self) -> None:
        """Kill the processes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end()

    def check(self) -> None:
        """Raise the error that has ended the supervision."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def _supervise(self) -> None:
        while True:
            slot, reason = await self._first_loss()
            lost_at = time.monotonic()
            self._replacements.reasons.append((slot.kind, reason))
            logger.info("%s is replaced: %s", slot.name, reason)
            await self._end()
            while True:
                try:
                    await self._launch()
                except (ConnectionError, TimeoutError) as error:
                    logger.info("%s did not start and starts again: %s", slot.name, error)
                    await self._end()
                else:
                    break
            self._replacements.seconds.append(time.monotonic() - lost_at)
            logger.info("%s serves again after %.1f s", slot.name, time.monotonic() - lost_at)

    async def _first_loss(self) -> tuple[Slot, str]:
        watches = {
            asyncio.create_task(slot.process.until_lost()): slot for slot in self.slots if slot.process is not None
        }
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            watch = done.pop()
            return watches[watch], watch.result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _launch(self) -> None:
        rendezvous = free_port(LOOPBACK) if len(self.slots) > 1 else 0
        for slot in self.slots:
            slot.process = RoleProcess(replace(slot.spec, rendezvous=rendezvous), slot.log)
            slot.process.launch()
        async with asyncio.timeout(START_SECONDS):
            addresses = await asyncio.gather(*(slot.process.ready() for slot in self.slots if slot.process))
        for slot, (address, http_url) in zip(self.slots, addresses, strict=True):
            slot.address, slot.http_url, slot.is_ready, slot.starts = address, http_url, True, slot.starts + 1

    async def _end(self) -> None:
        for slot in self.slots:
            slot.address, slot.http_url, slot.is_ready = "", "", False
        await asyncio.gather(*(slot.process.end() for slot in self.slots if slot.process is not None))


class ChaosCluster:
    """`targets` targets, each with a coordinator, and `drafters` drafters, between `start()` and `stop()`.

    Target `i` has `ranks[i]` ranks. `ingresses` ingresses serve both APIs and route to the coordinators. `doors` are
    the links from gRPC clients to the ingresses, or to the coordinators if there are no ingresses.
    """

    def __init__(
        self,
        configuration: Configuration,
        ranks: Sequence[int],
        drafters: int,
        ingresses: int,
        logs: Path,
        seed: int,
    ) -> None:
        self.replacements = Replacements()
        self.look_seconds = 0.05
        self.links: list[FaultyLink] = []
        self.doors: list[FaultyLink] = []
        self.learner: tuple[str, ...] = ()
        """Starts the learner's process, where drafts learn."""
        self._configuration = configuration
        self._ranks = tuple(ranks)
        self._drafters = drafters
        self._ingresses = ingresses
        self._logs = logs
        self._seed = seed
        self._owners: list[Owner] = []

    @property
    def size(self) -> int:
        """Number of its processes while none is lost."""
        return len(self.slots)

    def victims(self) -> list[Victim]:
        """The processes that serve."""
        return [
            Victim(slot.name, slot.kind, slot.process.pid, slot.process.signal)
            for slot in self.slots
            if slot.is_ready and slot.process is not None
        ]

    def serving(self) -> dict[str, str]:
        """The address of each process, empty while it does not serve."""
        return {slot.name: slot.address for slot in self.slots}

    @property
    def slots(self) -> list[Slot]:
        """All slots."""
        return [slot for owner in self._owners for slot in owner.slots]

    async def start(self) -> None:
        """Return once all processes serve."""
        values = self._configuration.model_dump_json()
        drafts = [
            Slot(f"draft-{index}", "draft", RoleSpec("draft", values, learner=self.learner), self._log())
            for index in range(self._drafters)
        ]
        self._owners = [Owner([slot], self.replacements) for slot in drafts]
        coordinators: list[Slot] = []
        for index, size in enumerate(self._ranks):
            sized = self._configuration.target.model_copy(update={"tensor_parallel": size})
            of_target = self._configuration.model_copy(update={"target": sized}).model_dump_json()
            first = RoleSpec("target", of_target, learner=self.learner)
            ranks = [Slot(f"target-{index}", "target", first, self._log())]
            for rank in range(1, size):
                spec = RoleSpec("rank", of_target, rank)
                ranks.append(Slot(f"target-{index}-rank-{rank}", "rank", spec, self._log()))
            self._owners.append(Owner(ranks, self.replacements))
            target = await self._link(ranks[0])
            links = [await self._link(slot) for slot in drafts]
            spec = RoleSpec("coordinator", values, target=target.address, drafts=tuple(link.address for link in links))
            coordinators.append(Slot(f"coordinator-{index}", "coordinator", spec, self._log()))
        workers = list(self._owners)
        entrances = [await self._link(slot) for slot in coordinators]
        addresses = tuple(link.address for link in entrances)
        spec = RoleSpec("ingress", values, coordinators=addresses)
        ingresses = [Slot(f"ingress-{index}", "ingress", spec, self._log()) for index in range(self._ingresses)]
        self._owners += [Owner([slot], self.replacements) for slot in (*coordinators, *ingresses)]
        await asyncio.gather(*(owner.start() for owner in workers))
        await asyncio.gather(*(owner.start() for owner in self._owners[len(workers) :]))
        self.doors = [await self._link(slot) for slot in ingresses] or entrances

    async def stop(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(owner.stop() for owner in self._owners))
        for link in self.links:
            await link.stop()

    def check(self) -> None:
        """Raise the error of an owner that has failed."""
        for owner in self._owners:
            owner.check()

    async def _link(self, slot: Slot) -> FaultyLink:
        link = FaultyLink(slot.resolve, random.Random(f"{self._seed}/{len(self.links)}"))
        await link.start()
        self.links.append(link)
        return link

    def _log(self) -> Path:
        return self._logs / "processes.log"
