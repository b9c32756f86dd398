"""Runs one role of the cluster in this process, on chosen cores.

    python -m tests.bench.processes.role_process '{"role": "target", "configuration": …, "cores": [0], "threads": 1}'

Prints its address as a line of JSON once it is ready. Answers every line of stdin with its counters since the last one.
Ends when stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.wire.connection import fixed_address
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.target_client import GrpcTarget
from deploy.coordinator_server import CoordinatorServer
from workers.serve.configuration import load_configuration

LOOPBACK = "127.0.0.1"
CollectCounters = Callable[[], dict[str, float]]
"""Returns the counters of a role since the last call."""


@dataclass(frozen=True)
class Role:
    """The role, configuration and cores of one process."""

    role: Literal["target", "draft", "coordinator"]
    configuration: str
    """The configuration as JSON. Model paths are local directories."""
    cores: tuple[int, ...]
    """The cores that the process may use."""
    threads: int = 1
    target: str = ""
    """The target's address, for a coordinator."""
    drafts: tuple[str, ...] = ()
    """The drafters' addresses, for a coordinator."""
    delay_seconds: float = 0.0
    """How much longer a message between a coordinator and a drafter takes, in seconds."""

    def to_json(self) -> str:
        """The role as an argument of the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Role:
        """The role from an argument of the command line."""
        values = json.loads(text)
        return cls(**values | {"cores": tuple(values["cores"]), "drafts": tuple(values["drafts"])})


class BusyTime:
    """Wraps some methods of an object and sums up the seconds spent in them."""

    def __init__(self, instance: Any, names: Sequence[str]) -> None:
        self.seconds = 0.0
        for name in names:
            if hasattr(instance, name):
                setattr(instance, name, self._timed(getattr(instance, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed


@dataclass
class Counting:
    """A drafter client that counts the nodes proposed, over a network with a delay."""

    inner: GrpcDrafter
    delay_seconds: float = 0.0
    counts: dict[str, float] = field(default_factory=lambda: {"nodes": 0.0, "ready": 0.0})

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        """Forward the call. Count the nodes proposed, and those that existed before the call."""
        await asyncio.sleep(self.delay_seconds)
        proposals = await self.inner.propose(rows, timeout_seconds)
        await asyncio.sleep(self.delay_seconds)
        for proposal in proposals:
            self.counts["nodes"] += len(proposal.tree)
            self.counts["ready"] += proposal.ready
        return proposals

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Forward the call."""
        await self.inner.release(sequence_ids)


@asynccontextmanager
async def running_role(role: Role) -> AsyncIterator[tuple[str, CollectCounters]]:
    """Run the role. Yields its address and its counters."""
    configuration = load_configuration(json.loads(role.configuration))
    async with AsyncExitStack() as stack:
        start = {"target": _start_target, "draft": _start_draft, "coordinator": _start_coordinator}[role.role]
        address, done = await start(role, configuration, stack)
        last, since = done(), time.perf_counter()

        def collect() -> dict[str, float]:
            nonlocal last, since
            (before, begun), (last, since) = (last, since), (done(), time.perf_counter())
            return {name: last[name] - before[name] for name in last} | {"wall_seconds": since - begun}

        yield address, collect


async def serve_role(role: Role) -> None:
    """Run the role until stdin is closed."""
    async with running_role(role) as (address, collect):
        _print_json({"address": address})
        while await asyncio.to_thread(sys.stdin.readline):
            _print_json(collect())


async def _start_target(role: Role, configuration: Configuration, stack: AsyncExitStack) -> tuple[str, CollectCounters]:
    from workers.draft.registry import create
    from workers.serve.worker_server import host_target
    from workers.verify.build import build_engine

    _set_threads(role.threads)
    draft = configuration.draft
    method = await asyncio.to_thread(create, draft, configuration.target) if draft.is_colocated else None
    engine = await asyncio.to_thread(build_engine, configuration.target, method=method)
    busy, drafting = BusyTime(engine, ("step",)), BusyTime(method, ("propose",))
    host = await stack.enter_async_context(host_target(LOOPBACK, engine))
    return host.address, lambda: {"busy_seconds": busy.seconds, "draft_seconds": drafting.seconds}


async def _start_draft(role: Role, configuration: Configuration, stack: AsyncExitStack) -> tuple[str, CollectCounters]:
    from workers.draft.registry import create
    from workers.serve.worker_server import host_draft

    draft = configuration.draft
    if draft.weights is not None:  # other drafters do not use torch
        _set_threads(role.threads)
    method = await asyncio.to_thread(create, draft, configuration.target)
    busy = BusyTime(method, ("propose", "run_ahead"))
    host = await stack.enter_async_context(host_draft(LOOPBACK, method))
    return host.address, lambda: {"busy_seconds": busy.seconds}


async def _start_coordinator(
    role: Role, configuration: Configuration, stack: AsyncExitStack
) -> tuple[str, CollectCounters]:
    target = GrpcTarget(fixed_address(role.target))
    stack.push_async_callback(target.close)
    drafters = [Counting(GrpcDrafter(fixed_address(address)), role.delay_seconds) for address in role.drafts]
    for drafter in drafters:
        stack.push_async_callback(drafter.inner.close)
    server = CoordinatorServer(configuration, target, drafters)
    stack.push_async_callback(server.stop, 0.0)
    port = await server.start()
    await server.wait_until_ready()
    return f"{LOOPBACK}:{port}", lambda: {
        name: sum(drafter.counts[name] for drafter in drafters) for name in drafters[0].counts
    }


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _print_json(values: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(values)}\n")
    sys.stdout.flush()


def main() -> None:
    """Run the role that the command line describes."""
    logging.disable(logging.WARNING)
    role = Role.from_json(sys.argv[1])
    os.sched_setaffinity(0, role.cores)
    asyncio.run(serve_role(role))


if __name__ == "__main__":
    main()
