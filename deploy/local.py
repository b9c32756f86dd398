"""The whole cluster in one process, without Ray: the same parts, over real gRPC on loopback.

For `pilotfish generate --in-process` and for tests. One rank only: further ranks need processes.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import uvicorn

from cluster.core.config import Configuration
from cluster.core.errors import ConfigurationError
from cluster.ingress.http import create_app
from cluster.wire.clients import GenerationClient, GrpcDrafter, GrpcTarget, Resolve
from deploy.frontend import Frontend
from workers.draft.method import create
from workers.serve.hosting import DraftHost, TargetHost
from workers.target.ranks import build_engine

LOOPBACK = "127.0.0.1"


class LocalCluster:
    """`async with LocalCluster(configuration) as cluster:` answers at `cluster.grpc_address`.

    Model paths in the configuration are local directories. With `http`, a server answers at
    `cluster.http_url` too. Ports of 0 take free ones. Raises `ConfigurationError`, `ModelLoadError`.
    """

    def __init__(self, configuration: Configuration, *, http: bool = False) -> None:
        self._configuration = configuration
        self._http = http
        self._stack = AsyncExitStack()
        self._grpc_port = 0
        self._http_port = 0

    @property
    def grpc_address(self) -> str:
        """Where the public gRPC service listens."""
        return f"{self._configuration.server.grpc_host}:{self._grpc_port}"

    @property
    def http_url(self) -> str:
        """Where the HTTP ingress listens, if it was asked for."""
        return f"http://{self._configuration.server.http_host}:{self._http_port}"

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
