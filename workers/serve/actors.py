"""The Ray actors that host the data plane: Ray places and restarts them, gRPC carries every token.

A target replica is the driver rank (rank 0), in the first bundle of its placement group. The worker ranks are actors in
the further bundles. If a rank ends, the replica becomes unhealthy. Serve then stops the replica with all its
worker ranks and starts a new one, with an empty KV pool at a new address.

Functions that compute import torch themselves, so that a process that only names these classes starts seconds faster.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.core.errors import TargetUnavailable
from cluster.core.ports import DraftMethod
from cluster.wire.address import socket_family
from workers.draft.registry import create, create_for_worker_rank
from workers.serve.configuration import load_configuration
from workers.serve.target_servicer import StepEngine
from workers.serve.worker_server import WorkerHost, host_draft, host_target, set_log_level

if TYPE_CHECKING:
    from workers.verify.group import DriverRank


_WORKER_RANKS_STOP_SECONDS = 5.0
"""Longest time for the worker ranks to end after the driver rank has stopped them, in seconds."""


class WorkerRank:
    """A rank above 0, in an actor of its own."""

    def run(
        self,
        section: Mapping[str, Any],
        draft_section: Mapping[str, Any],
        threads: int,
        rank: int,
        address: str,
        port: int,
    ) -> None:
        """Join the group, load this rank's part, and run the driver rank's commands until the stop command.

        Drafting methods that compute with the target's layers run on this rank, too.

        Raises any error that ends the group.
        """
        from workers.verify.build import build_engine
        from workers.verify.group import join_group, leave_group, run_worker_rank

        configuration = load_configuration({"target": section, "draft": draft_section})
        target = configuration.target
        set_threads(threads)
        join_group(target, rank, address, port)
        try:
            method = create_for_worker_rank(configuration.draft, target)
            run_worker_rank(build_engine(target, rank, method))
        finally:
            leave_group()


class TargetReplica:
    """The driver rank: starts the worker ranks, loads its own part, serves `TargetService` at an address of its own.

    It also drafts, if `draft_section` places the drafting method on the target.
    """

    def __init__(
        self, section: Mapping[str, Any], draft_section: Mapping[str, Any], threads: int, address: str | None
    ) -> None:
        configuration = load_configuration({"target": section, "draft": draft_section})
        self._section, self._draft = configuration.target, configuration.draft
        self._threads = threads
        self._address = address or node_address()
        self._worker_ranks: dict[asyncio.Future[None], int] = {}
        self._driver: DriverRank | None = None
        self._engine: StepEngine | None = None
        self._host: WorkerHost | None = None

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Start the target at the first call. Serve counts the replica as ready when this returns."""
        set_log_level(user_config)
        if self._host is None:
            self._host = await self._start()

    async def address(self) -> str:
        """The address at which `TargetService` listens; empty until it does."""
        return self._host.address if self._host is not None else ""

    async def check_health(self) -> None:
        """Raise an error if this replica is unusable, so that Serve replaces it."""
        self._raise_for_worker_ranks()
        if self._driver is not None and self._driver.failure is not None:
            raise TargetUnavailable(f"the tensor-parallel group is broken: {self._driver.failure}")
        if self._host is not None:
            self._host.check_health()

    async def __del__(self) -> None:
        """Stop the replica. Serve awaits this when it shuts the replica down."""
        if self._host is not None:
            await self._host.stop()
        if self._engine is not None:  # it may be loaded without being hosted
            await asyncio.to_thread(self._engine.close)
            if self._worker_ranks:
                await asyncio.wait(self._worker_ranks, timeout=_WORKER_RANKS_STOP_SECONDS)

    async def _start(self) -> WorkerHost:
        """Load the model in a thread, so that the event loop stays free to answer Serve. Then listen."""
        rendezvous = free_port(self._address)
        self._worker_ranks = self._spawn_worker_ranks(rendezvous)
        loading = asyncio.ensure_future(asyncio.to_thread(self._load, rendezvous))
        # A worker rank may end while the driver rank waits for it to join: raise instead of waiting for ever.
        awaited: list[asyncio.Future[Any]] = [loading, *self._worker_ranks]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        self._raise_for_worker_ranks()
        host = host_target(self._address, await loading)
        await host.start()
        return host

    def _load(self, rendezvous: int) -> StepEngine:
        from workers.verify.build import build_engine
        from workers.verify.group import DriverRank, join_group

        set_threads(self._threads)
        if self._section.tensor_parallel > 1:
            join_group(self._section, 0, self._address, rendezvous)
        method = create(self._draft, self._section) if self._draft.is_colocated else None
        engine = self._engine = build_engine(self._section, method=method)
        if self._section.tensor_parallel > 1:
            self._engine = self._driver = DriverRank(engine)
        return self._engine

    def _spawn_worker_ranks(self, rendezvous: int) -> dict[asyncio.Future[None], int]:
        """Start one actor per further bundle of this replica's placement group."""
        worker_ranks: dict[asyncio.Future[None], int] = {}
        group = get_current_placement_group()
        if group is None:
            return worker_ranks
        for rank in range(1, self._section.tensor_parallel):
            bundle = group.bundle_specs[rank]
            actor = ray.remote(WorkerRank).options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            section, draft = self._section.model_dump(mode="json"), self._draft.model_dump(mode="json")
            worker_rank: Any = actor.remote()  # Ray's types do not know the methods of actors
            running = worker_rank.run.remote(section, draft, self._threads, rank, self._address, rendezvous)
            worker_ranks[asyncio.wrap_future(running.future())] = rank
        return worker_ranks

    def _raise_for_worker_ranks(self) -> None:
        for running, rank in self._worker_ranks.items():
            if running.done():
                reason = "it was cancelled" if running.cancelled() else running.exception() or "it left the group"
                raise TargetUnavailable(f"rank {rank} of {self._section.tensor_parallel} ended: {reason}")


class DraftReplica:
    """Hosts one drafting method behind `DraftService`, at an address of its own."""

    def __init__(
        self, section: Mapping[str, Any], target_section: Mapping[str, Any], threads: int, address: str | None
    ) -> None:
        self._configuration = load_configuration({"draft": section, "target": target_section})
        self._threads = threads
        self._address = address or node_address()
        self._host: WorkerHost | None = None

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Start the drafter at the first call. Serve counts the replica as ready when this returns."""
        set_log_level(user_config)
        if self._host is None:
            host = host_draft(self._address, await asyncio.to_thread(self._load))
            await host.start()
            self._host = host

    async def address(self) -> str:
        """The address at which `DraftService` listens; empty until it does."""
        return self._host.address if self._host is not None else ""

    async def check_health(self) -> None:
        """Raise an error if this replica is unusable, so that Serve replaces it."""
        if self._host is not None:
            self._host.check_health()

    async def __del__(self) -> None:
        """Stop the replica. Serve awaits this when it shuts the replica down."""
        if self._host is not None:
            await self._host.stop()

    def _load(self) -> DraftMethod:
        if self._configuration.draft.weights is not None:
            set_threads(self._threads)
        return create(self._configuration.draft, self._configuration.target)


def set_threads(threads: int) -> None:
    """Set the number of intra-op threads of this process; Ray's default is one."""
    import torch

    torch.set_num_threads(threads)


def node_address() -> str:
    """The address at which other nodes reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def free_port(host: str) -> int:
    """A port of `host` that is free now, for the ranks' rendezvous."""
    with socket.socket(socket_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
