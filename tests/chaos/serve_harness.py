"""One run under Ray Serve: replicas, ranks, proxy, controller and directory are killed and frozen."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import psutil

from cluster.core.config.sections import Configuration
from cluster.core.errors import PilotfishError
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from tests.chaos.doors import Door, GrpcDoor, HttpDoor
from tests.chaos.faults import Disturber, Victim
from tests.chaos.harness import ChaosOptions, configure, prepare, stream_for
from tests.chaos.report import ChaosReport, by_role
from tests.chaos.streams import Streams
from tests.soak.watch import read_counts
from tests.support.clusters.faulty_link import FaultyLink
from tests.support.clusters.serve_process import ServeProcess

logger = logging.getLogger(__name__)

TITLES = {
    "coordinator": "ray::ServeReplica:pilotfish:Target",
    "draft": "ray::ServeReplica:pilotfish:Draft",
    "ingress": "ray::ServeReplica:pilotfish:Ingress",
    "target": "ray::FirstRank",
    "rank": "ray::WorkerRank",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
    "directory": "ray::Directory",
}
"""The titles that Ray gives to the processes of each role, which may go on."""
SETTLE_SECONDS = 150.0
"""Longest time until everything is back after the last fault, in seconds. Serve notices frozen replicas late."""
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
"""Metrics that are 0 while nobody is served."""


class ServeVictims:
    """The processes of a running cluster, found by their titles. It is `Disturbable`."""

    def __init__(self, process: ServeProcess) -> None:
        self.links: list[FaultyLink] = []
        self.look_seconds = 1.0
        self._process = process
        self._serving = _serving_ranks(process.configuration)
        self._first = self.by_role()

    @property
    def size(self) -> int:
        """Number of processes at first."""
        return sum(self._first.values())

    def victims(self) -> list[Victim]:
        """The processes that run now and serve. One that starts counts from its first moment.

        A rank that waits is younger than those that serve.
        """
        found: list[Victim] = []
        counts: Counter[str] = Counter()
        for process in sorted(self._process.descendants("ray::"), key=_age, reverse=True):
            with suppress(psutil.Error):
                title = " ".join(process.cmdline())
                kind = next((kind for kind, start in TITLES.items() if title.startswith(start)), None)
                if kind is None or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                    continue
                counts[kind] += 1
                if counts[kind] <= self._serving.get(kind, counts[kind]):
                    found.append(Victim(title[:60], kind, process.pid, partial(_signal, process)))
        return found

    def by_role(self) -> dict[str, int]:
        """Number of running processes of each role."""
        counts: dict[str, int] = {}
        for victim in self.victims():
            counts[victim.kind] = counts.get(victim.kind, 0) + 1
        return counts

    def check(self) -> None:
        """Do nothing: Ray and Serve are the owners."""

    def missing(self) -> list[str]:
        """How the numbers of processes differ from those at first."""
        now = self.by_role()
        return [f"{now.get(kind, 0)} {kind}, {n} at first" for kind, n in self._first.items() if now.get(kind, 0) != n]


async def run_serve_chaos(options: ChaosOptions, scratch: Path) -> ChaosReport:
    """Run streams through a cluster under Ray Serve whose processes are killed and stopped."""
    work = prepare(options, scratch)
    settings: dict[str, object] = {
        "server.http_port": 0,
        "server.ingress_replicas": options.ingresses,
        "target.replicas": len(options.ranks),
        "target.tensor_parallel": max(options.ranks),  # the replicas of a deployment are equal
        "target.threads": 1,
        "draft.replicas": options.drafters,
    }
    configuration = configure(work.model, settings | options.settings)
    begun = time.monotonic()
    http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None))
    with ServeProcess(scratch) as process:
        server = await asyncio.to_thread(process.start, configuration)
        victims = ServeVictims(process)
        logger.info("the cluster serves after %.1f s: %s", time.monotonic() - begun, victims.by_role())
        client = GenerationClient(fixed_address(server.grpc_address))
        doors: list[Sequence[Door]] = [[GrpcDoor(client)], [HttpDoor(http, lambda: server.http_url)]]
        streams = Streams(doors, work.requests, work.reference, options.at_once, options.seed)
        await stream_for(streams, 2.0)
        disturber = Disturber(victims, options.seed, options.pause_seconds, options.most_lost)
        running = asyncio.create_task(streams.run())
        await disturber.run(options.rounds, options.roles)
        streams.end()
        await running
        leaks = await _settled(victims, client)
        preemptions = int((await read_counts(client)).get("vllm:num_preemptions_total", 0.0))
        await client.close()
        await http.aclose()
    seconds = round(time.monotonic() - begun, 1)
    return ChaosReport(options.seed, seconds, by_role(disturber.counts), streams.results, preemptions, leaks)


async def _settled(victims: ServeVictims, client: GenerationClient) -> list[str]:
    """Wait until all processes are back and hold nothing. Returns what is different after `SETTLE_SECONDS`."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        left = victims.missing()
        try:
            counts = await read_counts(client)
            left += [f"{name} is {counts[name]}" for name in HELD if counts.get(name)]
        except PilotfishError as error:
            left.append(f"no metrics: {error}")
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(1.0)


def _serving_ranks(configuration: Configuration | None) -> dict[str, int]:
    """Number of ranks that serve, by role."""
    if configuration is None:
        return {}
    replicas, ranks = configuration.target.replicas, configuration.target.tensor_parallel
    return {"target": replicas, "rank": replicas * (ranks - 1)}


def _age(process: psutil.Process) -> float:
    """Seconds since a process began; 0 for one that has ended."""
    with suppress(psutil.Error):
        return time.time() - float(process.create_time())
    return 0.0


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    if process.is_running():  # also false when another process has the id now
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
