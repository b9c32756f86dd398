"""The Ray actors that host the data plane: Ray places and revives them, gRPC carries every token.

A target replica is rank 0 in the first bundle of its placement group; the other ranks are actors in
the further bundles. They live and die together: a dead rank makes the replica unhealthy, Serve ends
it, its followers end with it, and a new replica starts with an empty pool at a new address.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.core.config import DraftSection, TargetSection
from cluster.core.errors import TargetUnavailable
from cluster.wire.server import WireServer
from pilotfish.v1 import draft_pb2_grpc, target_pb2_grpc
from workers.draft.method import create
from workers.serve.draft_servicer import DraftServicer
from workers.serve.target_servicer import TargetServicer
from workers.target import ranks
from workers.target.engine import TargetEngine

logger = logging.getLogger(__name__)

TARGET_SERVICE = "pilotfish.v1.TargetService"
DRAFT_SERVICE = "pilotfish.v1.DraftService"

_GRACE_SECONDS = 1.0
"""How long calls in flight may take when a replica ends; the coordinator repeats them elsewhere."""


class Follower:
    """A rank above 0, in an actor of its own."""

    def run(self, section: Mapping[str, Any], threads: int, rank: int, address: str, port: int) -> None:
        """Join, load this rank's part, obey rank 0 until it says stop. Raises whatever ends the group."""
        target = TargetSection.model_validate(section)
        torch.set_num_threads(threads)
        ranks.join(rank, target.tensor_parallel, address, port)
        try:
            ranks.follow(ranks.build_engine(target, rank))
        finally:
            ranks.leave()


class TargetReplica:
    """Rank 0: loads, gathers its followers, serves `TargetService` at an address of its own."""

    async def __init__(
        self, section: Mapping[str, Any], threads: int, host: str | None, max_message_bytes: int
    ) -> None:
        self._section = TargetSection.model_validate(section)
        self._threads = threads
        self._host = host or ray.util.get_node_ip_address()
        self._server = WireServer(self._host, 0, max_message_bytes=max_message_bytes)
        self._followers: dict[asyncio.Future[None], int] = {}
        self._group: ranks.RankZero | None = None
        self._servicer: TargetServicer | None = None
        self._port = 0
        await self._start()

    async def address(self) -> str:
        """Where `TargetService` listens."""
        return f"{self._host}:{self._port}"

    async def check_health(self) -> None:
        """Raise what makes this replica useless, so that Serve replaces it."""
        self._raise_for_followers()
        if self._group is not None and self._group.broken is not None:
            raise TargetUnavailable(f"the tensor-parallel group is broken: {self._group.broken}")

    async def __del__(self) -> None:
        """Serve calls this when the replica ends on purpose."""
        await self._server.stop(_GRACE_SECONDS)
        if self._servicer is not None:
            await self._servicer.close()

    async def _start(self) -> None:
        """Load in a thread: the event loop stays free for Serve's questions."""
        rendezvous = free_port(self._host)
        self._followers = self._spawn_followers(rendezvous)
        loading = asyncio.ensure_future(asyncio.to_thread(self._load, rendezvous))
        # A follower that ends while rank 0 waits for it must not leave rank 0 waiting for ever.
        await asyncio.wait([loading, *self._followers], return_when=asyncio.FIRST_COMPLETED)
        self._raise_for_followers()
        engine = await loading
        self._servicer = TargetServicer(engine)
        self._server.add(TARGET_SERVICE, target_pb2_grpc.add_TargetServiceServicer_to_server, self._servicer)
        self._port = await self._server.start()
        await self._server.set_serving(TARGET_SERVICE, True)

    def _load(self, rendezvous: int) -> TargetEngine | ranks.RankZero:
        torch.set_num_threads(self._threads)
        if self._section.tensor_parallel == 1:
            return ranks.build_engine(self._section)
        ranks.join(0, self._section.tensor_parallel, self._host, rendezvous)
        self._group = ranks.RankZero(ranks.build_engine(self._section))
        return self._group

    def _spawn_followers(self, rendezvous: int) -> dict[asyncio.Future[None], int]:
        """One actor per further bundle of this replica's placement group."""
        followers: dict[asyncio.Future[None], int] = {}
        group = ray.util.get_current_placement_group()
        for rank in range(1, self._section.tensor_parallel):
            claims = group.bundle_specs[rank]
            actor = ray.remote(Follower).options(
                num_cpus=claims.get("CPU", 0),
                num_gpus=claims.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            handle = actor.remote()
            section = self._section.model_dump(mode="json")
            running = handle.run.remote(section, self._threads, rank, self._host, rendezvous)
            followers[asyncio.wrap_future(running.future())] = rank
        return followers

    def _raise_for_followers(self) -> None:
        for running, rank in self._followers.items():
            if running.done():
                reason = "it was cancelled" if running.cancelled() else running.exception() or "it left the group"
                raise TargetUnavailable(f"rank {rank} of {self._section.tensor_parallel} ended: {reason}")


class DraftReplica:
    """Hosts one draft method behind `DraftService`."""

    async def __init__(
        self,
        section: Mapping[str, Any],
        target_section: Mapping[str, Any],
        threads: int,
        host: str | None,
        max_message_bytes: int,
    ) -> None:
        self._section = DraftSection.model_validate(section)
        self._target_section = TargetSection.model_validate(target_section)
        self._threads = threads
        self._host = host or ray.util.get_node_ip_address()
        self._server = WireServer(self._host, 0, max_message_bytes=max_message_bytes)
        self._servicer: DraftServicer | None = None
        self._port = 0
        await self._start()

    async def address(self) -> str:
        """Where `DraftService` listens."""
        return f"{self._host}:{self._port}"

    async def __del__(self) -> None:
        """Serve calls this when the replica ends on purpose."""
        await self._server.stop(_GRACE_SECONDS)
        if self._servicer is not None:
            await self._servicer.close()

    async def _start(self) -> None:
        torch.set_num_threads(self._threads)
        method = await asyncio.to_thread(create, self._section.method, self._section, self._target_section)
        self._servicer = DraftServicer(method)
        self._server.add(DRAFT_SERVICE, draft_pb2_grpc.add_DraftServiceServicer_to_server, self._servicer)
        self._port = await self._server.start()
        await self._server.set_serving(DRAFT_SERVICE, True)


def free_port(host: str) -> int:
    """A port of `host` that is free now, for the ranks to meet at."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
