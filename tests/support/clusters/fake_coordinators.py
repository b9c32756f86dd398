"""Several coordinators over fake targets in one process, each behind connections that a test can cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.core.config.sections import Configuration
from cluster.core.membership import Member
from cluster.ingress.router.router import Router
from cluster.wire.connection import fixed_address
from cluster.wire.coordinator_client import CoordinatorClient
from deploy.coordinator_server import CoordinatorServer
from tests.support.clusters.coordinators import coordinator
from tests.support.fakes.fake_cluster import configure
from tests.support.fakes.fake_drafters import FakeDrafter, RandomDrafter
from tests.support.fakes.fake_target import FakeTarget
from tests.support.models.tiny_tokenizer import byte_level

LOOPBACK = "127.0.0.1"
VOCABULARY = 282
"""Tokens of the byte-level tokenizer."""


@dataclass
class CuttableConnections:
    """Forwards connections to a server until `cut`, which resets all of them as the death of the process does."""

    port: int
    listener: asyncio.Server | None = None
    open: set[asyncio.StreamWriter] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    address: str = ""

    async def start(self) -> None:
        """Listen; after `cut`, at the same address."""
        port = int(self.address.rpartition(":")[2] or 0)
        self.listener = await asyncio.start_server(self._forward, LOOPBACK, port)
        self.address = f"{LOOPBACK}:{self.listener.sockets[0].getsockname()[1]}"

    def cut(self) -> int:
        """Reset all connections and refuse new ones. Returns how many were open."""
        assert self.listener is not None
        self.listener.close()
        count = len(self.open)
        for writer in tuple(self.open):
            writer.transport.abort()
        return count

    async def close(self) -> None:
        """End what is left."""
        self.cut()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(LOOPBACK, self.port)
        except OSError:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        self.open |= {writer, server_writer}
        await asyncio.gather(_pump(reader, server_writer), _pump(server_reader, writer))
        self.open -= {writer, server_writer}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


class FakeReplica:
    """One coordinator with its fake target. It can die and be started again, with another address and id."""

    def __init__(self, name: str, configuration: Configuration, **target: Any) -> None:
        self.name = name
        self.starts = 0
        self.target = FakeTarget(vocabulary_size=VOCABULARY, prefix_cache=True, max_context_len=2048, **target)
        self.drafter: FakeDrafter = RandomDrafter(self.target)
        self._configuration = configuration
        self._server: CoordinatorServer | None = None
        self._connections: CuttableConnections | None = None

    @property
    def view(self) -> Member:
        """The entry of the replica in a directory, which may be out of date."""
        assert self._connections is not None
        stalled = 0.0 if self._server is None else self._server.load.stalled_seconds
        return coordinator(f"{self.name}-{self.starts}", self._connections.address, stalled_seconds=stalled)

    @property
    def is_alive(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        self._server = CoordinatorServer(self._configuration, self.target, [self.drafter], internal_host="127.0.0.1")
        self._connections = CuttableConnections(await self._server.start())
        await self._connections.start()
        await self._server.wait_until_ready()
        self.starts += 1

    async def die(self) -> None:
        """Reset all connections at once, then free the rest of the process."""
        assert self._server is not None
        assert self._connections is not None
        self._connections.cut()
        await self.leave(0.0)

    async def leave(self, drain_seconds: float) -> None:
        """Stop as on SIGTERM."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(drain_seconds)
            assert self._connections is not None
            await self._connections.close()


class CountingClient(CoordinatorClient):
    """A client that records which requests were sent again."""

    def __init__(self, address: str, resumed: list[str]) -> None:
        super().__init__(fixed_address(address))
        self._resumed = resumed

    def generate(self, request: Any, timeout_seconds: float) -> Any:
        if request.resume:
            self._resumed.append(request.request_id)
        return super().generate(request, timeout_seconds)


@dataclass
class FakeReplicas:
    """Replicas, and a router over those that the view names."""

    replicas: Sequence[FakeReplica]
    resumed: list[str] = field(default_factory=list)
    """Ids of requests that were sent again."""
    hidden: set[str] = field(default_factory=set)
    """Names of the replicas that the view leaves out."""
    draining: set[str] = field(default_factory=set)
    """Names of the replicas that the view calls draining."""
    routers: list[Router] = field(default_factory=list)
    """What `router` has made. They are closed before the replicas end."""

    def members(self) -> list[Member]:
        return [
            replace(one.view, is_draining=one.name in self.draining)
            for one in self.replicas
            if one.name not in self.hidden
        ]

    def router(self, patience_seconds: float = 30.0) -> Router:
        made = Router(self.members, lambda address: CountingClient(address, self.resumed), patience_seconds)
        self.routers.append(made)
        return made

    async def kill_one(self, draw: random.Random) -> None:
        """Kill a random replica, and start it again after a while. The view may name it in between."""
        victim = draw.choice(self.replicas)
        if draw.random() < 0.5:
            await victim.die()
            self.hidden.add(victim.name)
        else:
            self.hidden.add(victim.name)
            await victim.die()
        await asyncio.sleep(draw.uniform(0.0, 0.1))
        await victim.start()
        self.hidden.discard(victim.name)


@asynccontextmanager
async def fake_replicas(
    directory: Path, count: int, *, step_delay: float = 0.0, **overrides: object
) -> AsyncIterator[FakeReplicas]:
    """Running coordinators with the byte-level tokenizer. Their drafts are accepted and rejected at random."""
    values: dict[str, object] = {"server__grpc_port": 0, "target__path": str(byte_level(directory))}
    configuration = configure(**values | {"scheduler__max_step_tokens": 512} | overrides)
    replicas = [FakeReplica(f"r{index}", configuration, step_delay=step_delay) for index in range(count)]
    cluster = FakeReplicas(replicas)
    try:
        for replica in replicas:
            await replica.start()
        yield cluster
    finally:
        for router in cluster.routers:
            await router.close()
        for replica in replicas:
            await replica.leave(0.0)
