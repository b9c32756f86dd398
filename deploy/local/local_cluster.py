"""The whole cluster in one process, without Ray. Its components are the same and communicate over gRPC on loopback.

Used by `pilotfish generate --in-process` and by tests. Its target has one rank, because further ranks need processes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

import uvicorn

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, DrafterUnavailable
from cluster.core.ports import Target
from cluster.ingress.access.api_keys import ApiKey
from cluster.ingress.access.browsers import BrowserRules
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.connections.protocol import BoundedHttpProtocol
from cluster.ingress.endpoints.page import Page
from cluster.ingress.http import create_app
from cluster.wire.address import http_url, join_host_port
from cluster.wire.connection import fixed_address
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.generation_client import GenerationClient
from cluster.wire.peer_access import PeerAccess, PublicAccess
from cluster.wire.target_client import GrpcTarget
from deploy.coordinator_server import CoordinatorServer
from deploy.implied_settings import with_implied_settings
from deploy.network.cluster_token import draw_token
from workers.draft.registry import create, described
from workers.serve.learning.learner import start_learner
from workers.serve.lease_servicer import Leases
from workers.serve.worker_server import WorkerHost, host_draft, host_target
from workers.verify.build import build_engine

LOOPBACK = "127.0.0.1"


class LocalCluster:
    """An asynchronous context manager: inside, the cluster serves at `grpc_address`.

    Model paths in the configuration are local directories. With `http`, the HTTP API is served at `http_url` too. A
    port of 0 takes a free one. Raises `ConfigurationError`, `ModelLoadError`.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        http: bool = False,
        api_keys: Sequence[ApiKey] = (),
        target: Target | None = None,
    ) -> None:
        """`api_keys` open the public APIs, as those in `server.api_key_file` do; without any, everybody may call.

        The cluster is for its own process: whatever the configuration says, the public APIs listen on loopback, without
        TLS. A `target` runs in other processes, with the drafts of this configuration; its owner closes it.
        """
        self._target = target
        own = {"tls": None, "http_host": LOOPBACK, "grpc_host": LOOPBACK}
        server = configuration.server.model_copy(update=own)
        self._configuration = configuration.model_copy(update={"server": server})
        self._token = draw_token()
        self._keys = KeyRing(api_keys, configuration.server.api_key_file, self._token.api_key())
        self._http = http
        self._drafters: list[LocalDrafter] = []
        self._stack = AsyncExitStack()
        self._grpc_port = 0
        self._http_port = 0

    @property
    def grpc_address(self) -> str:
        """The address of the gRPC API."""
        return join_host_port(LOOPBACK, self._grpc_port)

    @property
    def access(self) -> PublicAccess:
        """What the process of the cluster presents to its public APIs."""
        return PublicAccess(self._token.api_key())

    @property
    def http_url(self) -> str:
        """The URL of the HTTP API, if the cluster was started with `http`."""
        return http_url(LOOPBACK, self._http_port)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        configuration = with_implied_settings(self._configuration)
        draft, access = configuration.draft, PeerAccess(self._token, configuration.cluster.tls)
        target = self._target or await self._host_target(configuration, access)
        for _ in range(draft.replicas if draft.uses_drafters else 0):
            self._drafters.append(await self._stack.enter_async_context(LocalDrafter(configuration, access)))
        lease_seconds = configuration.cluster.lease_seconds
        draft_clients = [GrpcDrafter(drafter.resolve, access, lease_seconds) for drafter in self._drafters]
        for client in draft_clients:
            self._stack.push_async_callback(client.close)
        coordinator = CoordinatorServer(configuration, target, draft_clients, keys=self._keys)
        self._stack.push_async_callback(coordinator.stop, 0.0)
        self._grpc_port = await coordinator.start()
        await coordinator.wait_until_ready()
        if self._http:
            await self._start_http()

    async def _host_target(self, configuration: Configuration, access: PeerAccess) -> Target:
        """A target of one rank in this process."""
        target, _ = await self._stack.enter_async_context(host_one_rank(configuration, access))
        return target

    def _page(self) -> Page | None:
        server = self._configuration.server
        if server.page == "off":
            return None
        return Page(self._grpc_port, self._kill_drafter if server.demo == "on" else None)

    async def _kill_drafter(self) -> bool:
        """Kill the first drafter. Returns whether there is one that runs."""
        return bool(self._drafters) and await self._drafters[0].kill()

    async def _start_http(self) -> None:
        client = GenerationClient(fixed_address(self.grpc_address), self.access)
        self._stack.push_async_callback(client.close)
        server_section = self._configuration.server
        listener = socket.create_server((LOOPBACK, server_section.http_port))
        self._http_port = int(listener.getsockname()[1])
        app = create_app(
            client,
            self._configuration.limits,
            keys=self._keys,
            page=self._page(),
            browsers=BrowserRules(server_section.cors_origins, server_section.allowed_hosts),
        )
        config = uvicorn.Config(app, log_level="warning", lifespan="off", http=BoundedHttpProtocol)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))

        async def stop() -> None:
            server.should_exit = True
            await serving

        self._stack.push_async_callback(stop)


@asynccontextmanager
async def host_one_rank(configuration: Configuration, access: PeerAccess) -> AsyncIterator[tuple[Target, WorkerHost]]:
    """Inside, a target of one rank serves this process, with the drafts of the configuration, which implies all else.

    Raises `ConfigurationError` for several ranks, `ModelLoadError`.
    """
    if configuration.target.tensor_parallel > 1:
        raise ConfigurationError(
            f"target.tensor_parallel: needed 1 in one process, found {configuration.target.tensor_parallel}; "
            "use `pilotfish serve`"
        )
    async with AsyncExitStack() as stack:
        draft = configuration.draft
        colocated = await asyncio.to_thread(create, draft, configuration.target) if draft.is_colocated else None
        engine = await asyncio.to_thread(build_engine, configuration.target, method=colocated)
        lease_seconds = configuration.cluster.lease_seconds
        learning = None
        if draft.learn == "on" and draft.is_colocated:
            learner = await asyncio.to_thread(start_learner, configuration, colocated, lambda: engine.is_idle)
            stack.callback(learner.close)
            learning = learner.status
        host = host_target(LOOPBACK, engine, access, lease_seconds=lease_seconds, learning=learning)
        hosted = await stack.enter_async_context(host)
        step_timeout = configuration.target.step_timeout_seconds
        client = GrpcTarget(fixed_address(hosted.address), access, step_timeout, lease_seconds)
        stack.push_async_callback(client.close)
        yield client, hosted


RESTART_SECONDS = 5.0
"""Time between the end of a killed drafter and the start of the next one, in seconds."""


class LocalDrafter:
    """An asynchronous context manager: inside, a drafter listens on a free port, unless it was killed just now."""

    def __init__(
        self, configuration: Configuration, access: PeerAccess, restart_seconds: float = RESTART_SECONDS
    ) -> None:
        self._configuration = configuration
        self._access = access
        self._restart_seconds = restart_seconds
        self._host: WorkerHost | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._restarting is not None and self._stopping is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, self._stopping, return_exceptions=True)
        if self._host is not None:
            await self._host.stop()

    async def resolve(self) -> str:
        """Return the address of the drafter. Raises `DrafterUnavailable` while there is none."""
        if self._host is None:
            raise DrafterUnavailable("the drafter was killed and has not started again yet")
        return self._host.address

    async def kill(self) -> bool:
        """Stop the drafter and lose what it holds; another one starts later. Returns whether it was running."""
        host, self._host = self._host, None
        if host is None:
            return False
        self._stopping = asyncio.create_task(host.stop(), name="stop-drafter")
        self._restarting = asyncio.create_task(self._restart(self._stopping), name="restart-drafter")
        return True

    async def _start(self) -> None:
        configuration = self._configuration
        method = await asyncio.to_thread(create, configuration.draft, configuration.target)
        leases, learner = Leases(configuration.cluster.lease_seconds), None
        if configuration.draft.learn == "on":
            learner = await asyncio.to_thread(start_learner, configuration, method, lambda: leases.is_empty)
        host = host_draft(
            LOOPBACK,
            method,
            self._access,
            leases=leases,
            described=described(configuration.draft),
            learner=learner,
        )
        await host.__aenter__()
        self._host = host

    async def _restart(self, stopping: asyncio.Task[None]) -> None:
        await asyncio.shield(stopping)
        await asyncio.sleep(self._restart_seconds)
        await self._start()
