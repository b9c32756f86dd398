"""Runs one role of the cluster in this process, on chosen cores.

    python -m tests.bench.processes.role_process '{"role": "target", "configuration": …, "cores": [0], "threads": 1}'

Prints its address as a line of JSON once it is ready. Answers every line of stdin with the time in which it
drafted since the last one. Ends when stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
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


class DraftTime:
    """The time in which a method drafts."""

    def __init__(self, method: Any = None) -> None:
        self._seconds = 0.0
        if method is not None:
            method.propose = self._timed(method.propose)

    def taken(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _timed(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return propose(*arguments)
            finally:
                self._seconds += time.perf_counter() - begun

        return timed


@dataclass
class Distant:
    """A drafter client over a network with a delay."""

    inner: GrpcDrafter
    delay_seconds: float = 0.0

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        """Forward the call."""
        await asyncio.sleep(self.delay_seconds)
        proposals = await self.inner.propose(rows, timeout_seconds)
        await asyncio.sleep(self.delay_seconds)
        return proposals

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Forward the call."""
        await self.inner.release(sequence_ids)


async def serve_role(role: Role) -> None:
    """Run the role until stdin is closed."""
    configuration = load_configuration(json.loads(role.configuration))
    drafted = DraftTime()
    async with AsyncExitStack() as stack:
        if role.role == "target":
            address, drafted = await _start_target(role, configuration, stack)
        elif role.role == "draft":
            address = await _start_draft(role, configuration, stack)
        else:
            address = await _start_coordinator(role, configuration, stack)
        _print_json({"address": address})
        while await asyncio.to_thread(sys.stdin.readline):
            _print_json({"draft_seconds": drafted.taken()})


async def _start_target(role: Role, configuration: Configuration, stack: AsyncExitStack) -> tuple[str, DraftTime]:
    from workers.draft.registry import create
    from workers.serve.worker_server import host_target
    from workers.verify.build import build_engine

    _set_threads(role.threads)
    draft = configuration.draft
    method = await asyncio.to_thread(create, draft, configuration.target) if draft.is_colocated else None
    engine = await asyncio.to_thread(build_engine, configuration.target, method=method)
    drafted = DraftTime(method)
    host = await stack.enter_async_context(host_target(LOOPBACK, engine))
    return host.address, drafted


async def _start_draft(role: Role, configuration: Configuration, stack: AsyncExitStack) -> str:
    from workers.draft.registry import create
    from workers.serve.worker_server import host_draft

    draft = configuration.draft
    if draft.weights is not None:  # other drafters do not use torch
        _set_threads(role.threads)
    method = await asyncio.to_thread(create, draft, configuration.target)
    host = await stack.enter_async_context(host_draft(LOOPBACK, method))
    return host.address


async def _start_coordinator(role: Role, configuration: Configuration, stack: AsyncExitStack) -> str:
    target = GrpcTarget(fixed_address(role.target))
    stack.push_async_callback(target.close)
    drafters = [Distant(GrpcDrafter(fixed_address(address)), role.delay_seconds) for address in role.drafts]
    for drafter in drafters:
        stack.push_async_callback(drafter.inner.close)
    server = CoordinatorServer(configuration, target, drafters)
    stack.push_async_callback(server.stop, 0.0)
    port = await server.start()
    await server.wait_until_ready()
    return f"{LOOPBACK}:{port}"


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
