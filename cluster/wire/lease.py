"""A client's lease on a worker: its name, and the calls that renew the lease while the client makes no others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import grpc

from cluster.core.errors import DeadlineExceeded, PilotfishError
from cluster.wire.connection import SHORT_CALL_SECONDS, Connection
from pilotfish.v1 import lease_pb2, lease_pb2_grpc

log = logging.getLogger(__name__)

RENEWALS = 4
"""How many times a lease can be renewed before it ends."""


class Lease:
    """What a client stores on a worker belongs to its lease. It begins with the client's first call.

    A client that has ended renews nothing, and the worker frees what it stored.
    """

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self._is_used = False
        self._task: asyncio.Task[None] | None = None
        self.client = uuid4().hex
        """The name of the client, which no other client has."""

    async def call(self, method: Callable[[grpc.aio.Channel], Any], request: Any, timeout_seconds: float) -> Any:
        """Make a call of the client as `Connection.call` does. It renews the lease, which is kept until `close`.

        Where there is no answer in time, it raises what the connection raises for a server that is not available.
        """
        await self._connection.channel()
        self._is_used = True
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="lease")
        try:
            return await self._connection.call(method, request, timeout_seconds)
        except DeadlineExceeded as error:
            raise self._connection.unavailable(f"no answer within {timeout_seconds} s") from error

    def close(self) -> None:
        """Renew the lease no longer."""
        if self._task is not None:
            self._task.cancel()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / RENEWALS)
            if self._is_used:
                self._is_used = False
            else:
                await self._renew()

    async def _renew(self) -> None:
        request = lease_pb2.RenewRequest(client=self.client)
        try:
            await self._connection.call(_renewal, request, SHORT_CALL_SECONDS)
        except PilotfishError as error:
            log.debug("the lease is not renewed: %s", error)


def _renewal(channel: grpc.aio.Channel) -> Any:
    stub: Any = lease_pb2_grpc.LeaseServiceStub(channel)
    return stub.Renew
