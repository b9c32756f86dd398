"""The Ray actors that host the data plane: Ray places and revives them, gRPC carries every token.

A target replica is rank 0 in the first bundle of its placement group; the other ranks are actors in
the further bundles. They live and die together: a dead rank makes the replica unhealthy, Serve ends
it, its followers end with it, and a new replica starts with an empty pool at a new address.

Torch is imported where it computes: whoever only names these classes, or only looks up, starts seconds sooner.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.core.config import DraftSection, TargetSection
from cluster.core.errors import TargetUnavailable
from workers.draft.registry import DraftMethod, create
from workers.serve.target_servicer import StepEngine
from workers.serve.worker_server import WorkerHost, host_draft, host_target, set_log_level

if TYPE_CHECKING:
    from workers.verify.ranks import RankZero


_FOLLOWERS_SECONDS = 5.0
"""How long the other ranks may take to end once they are told."""


class Follower:
    """A rank above 0, in an actor of its own."""

    def run(self, section: Mapping[str, Any], threads: int, rank: int, address: str, port: int) -> None:
        """Join, load this rank's part, obey rank 0 until it says stop. Raises whatever ends the group."""
        from workers.verify import ranks

        target = TargetSection.model_validate(section)
        set_threads(threads)
        ranks.join(target, rank, address, port)
        try:
            ranks.follow(ranks.build_engine(target, rank))
        finally:
            ranks.leave()


class TargetReplica:
    """Rank 0: loads, gathers its followers, serves `TargetService` at an address of its own."""

    def __init__(self, section: Mapping[str, Any], threads: int, address: str | None) -> None:
        self._section = TargetSection.model_validate(section)
        self._threads = threads
        self._address = address or node_address()
        self._followers: dict[asyncio.Future[None], int] = {}
        self._group: RankZero | None = None
        self._engine: StepEngine | None = None
        self._host: WorkerHost | None = None

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Serve calls this on the event loop of requests, before it counts the replica as up. Raises what failed."""
        set_log_level(user_config)
        if self._host is None:
            self._host = await self._start()

    async def address(self) -> str:
        """Where `TargetService` listens."""
        return self._host.address if self._host is not None else ""

    async def check_health(self) -> None:
        """Raise what makes this replica useless, so that Serve replaces it."""
        self._raise_for_followers()
        if self._group is not None and self._group.broken is not None:
            raise TargetUnavailable(f"the tensor-parallel group is broken: {self._group.broken}")
        if self._host is not None:
            self._host.check_health()

    async def __del__(self) -> None:
        """Serve calls this when the replica ends on purpose."""
        if self._host is not None:
            await self._host.stop()
        if self._engine is not None:  # loaded, but perhaps never hosted
            await asyncio.to_thread(self._engine.close)
            if self._followers:
                await asyncio.wait(self._followers, timeout=_FOLLOWERS_SECONDS)

    async def _start(self) -> WorkerHost:
        """Load in a thread: the event loop stays free for Serve's questions."""
        rendezvous = free_port(self._address)
        self._followers = self._spawn_followers(rendezvous)
        loading = asyncio.ensure_future(asyncio.to_thread(self._load, rendezvous))
        # A follower that ends while rank 0 waits for it must not leave rank 0 waiting for ever.
        awaited: list[asyncio.Future[Any]] = [loading, *self._followers]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        self._raise_for_followers()
        host = host_target(self._address, await loading)
        await host.start()
        return host

    def _load(self, rendezvous: int) -> StepEngine:
        from workers.verify import ranks

        set_threads(self._threads)
        if self._section.tensor_parallel == 1:
            self._engine = ranks.build_engine(self._section)
        else:
            ranks.join(self._section, 0, self._address, rendezvous)
            self._engine = self._group = ranks.RankZero(ranks.build_engine(self._section))
        return self._engine

    def _spawn_followers(self, rendezvous: int) -> dict[asyncio.Future[None], int]:
        """One actor per further bundle of this replica's placement group."""
        followers: dict[asyncio.Future[None], int] = {}
        group = get_current_placement_group()
        if group is None:
            return followers
        for rank in range(1, self._section.tensor_parallel):
            claims = group.bundle_specs[rank]
            actor = ray.remote(Follower).options(
                num_cpus=claims.get("CPU", 0),
                num_gpus=claims.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            section = self._section.model_dump(mode="json")
            follower: Any = actor.remote()  # Ray's types do not know the methods of actors
            running = follower.run.remote(section, self._threads, rank, self._address, rendezvous)
            followers[asyncio.wrap_future(running.future())] = rank
        return followers

    def _raise_for_followers(self) -> None:
        for running, rank in self._followers.items():
            if running.done():
                reason = "it was cancelled" if running.cancelled() else running.exception() or "it left the group"
                raise TargetUnavailable(f"rank {rank} of {self._section.tensor_parallel} ended: {reason}")


class DraftReplica:
    """Hosts one drafting method behind `DraftService`, at an address of its own."""

    def __init__(
        self, section: Mapping[str, Any], target_section: Mapping[str, Any], threads: int, address: str | None
    ) -> None:
        self._section = DraftSection.model_validate(section)
        self._target_section = TargetSection.model_validate(target_section)
        self._threads = threads
        self._address = address or node_address()
        self._host: WorkerHost | None = None

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """As `TargetReplica.reconfigure`."""
        set_log_level(user_config)
        if self._host is None:
            host = host_draft(self._address, await asyncio.to_thread(self._load))
            await host.start()
            self._host = host

    async def address(self) -> str:
        """Where `DraftService` listens."""
        return self._host.address if self._host is not None else ""

    async def check_health(self) -> None:
        """Raise what makes this replica useless, so that Serve replaces it."""
        if self._host is not None:
            self._host.check_health()

    async def __del__(self) -> None:
        """Serve calls this when the replica ends on purpose."""
        if self._host is not None:
            await self._host.stop()

    def _load(self) -> DraftMethod:
        if self._section.model is not None:
            set_threads(self._threads)
        return create(self._section.method, self._section, self._target_section)


def set_threads(threads: int) -> None:
    """Intra-op threads of this process; Ray's own default is one."""
    import torch

    torch.set_num_threads(threads)


def node_address() -> str:
    """Where other nodes reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def free_port(host: str) -> int:
    """A port of `host` that is free now, for the ranks to meet at."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
