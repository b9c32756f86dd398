"""Hosts an engine or a drafting method behind a gRPC server, with or without Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from cluster.core.config.cluster_section import LEASE_SECONDS
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DescribedMethod
from cluster.core.errors import WorkerUnavailable
from cluster.core.ports import DraftMethod
from cluster.core.verification import LearningStatus
from cluster.wire.address import join_host_port
from cluster.wire.lease import RENEWALS
from cluster.wire.peer_access import OPEN, PeerAccess
from cluster.wire.server import WireServer
from pilotfish.v1 import draft_pb2_grpc, lease_pb2_grpc, target_pb2_grpc
from workers.serve.draft_servicer import DraftServicer
from workers.serve.lease_servicer import LeasedServicer, Leases, LeaseServicer
from workers.serve.target_servicer import StepEngine, TargetServicer

if TYPE_CHECKING:
    from workers.serve.learning.learner import Learner

logger = logging.getLogger(__name__)

TARGET_SERVICE = "pilotfish.v1.TargetService"
DRAFT_SERVICE = "pilotfish.v1.DraftService"
LEASE_SERVICE = "pilotfish.v1.LeaseService"

HANG_SECONDS = TargetSection().step_timeout_seconds
"""Longest time of one computation where no configuration sets it, in seconds."""
_MOST_FAILURES = 3
"""Consecutive computations that may fail before the worker counts as broken."""
_GRACE_SECONDS = 1.0
"""Time for calls in flight to finish when a worker stops. The coordinator repeats the others on another worker."""


class WorkerHost:
    """Serves from `start()` to `stop()` at `host`. Also a context manager.

    The host owns the servicer and the engine behind it from construction on: `stop()` closes them, even if `start()`
    was not called or has failed. A computation that takes longer than `hang_seconds` makes it unhealthy.
    """

    def __init__(
        self,
        host: str,
        service: str,
        servicer: LeasedServicer[Any],
        add_to_server: Callable[[Any, Any], None],
        access: PeerAccess = OPEN,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        self._host = host
        self._access = access
        self._service = service
        self._servicer = servicer
        self._add_to_server = add_to_server
        self._hang_seconds = hang_seconds
        self._server: WireServer | None = None
        self._port = 0
        self._expiry: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        """The address at which it listens, once started."""
        return join_host_port(self._host, self._port)

    def check_health(self) -> None:
        """Raise `WorkerUnavailable` when the last computations all failed, or when one does not end.

        The device may be lost, or a collective waits for a rank that is gone. Only a new process can help.
        """
        if self._servicer.failures >= _MOST_FAILURES:
            raise WorkerUnavailable(f"{self._service}: the last {self._servicer.failures} computations failed")
        if (seconds := self._servicer.busy_seconds) > self._hang_seconds:
            raise WorkerUnavailable(
                f"{self._service}: a computation runs for {seconds:.0f} s, longer than {self._hang_seconds:g} s"
            )

    async def start(self, port: int = 0) -> None:
        """Start to listen, at port 0 on any free port. Raises `ConfigurationError` when the address cannot be bound."""
        leases = LeaseServicer(self._servicer.leases)
        self._server = server = WireServer(self._host, port, access=self._access)
        server.add(self._service, self._add_to_server, self._servicer)
        server.add(LEASE_SERVICE, lease_pb2_grpc.add_LeaseServiceServicer_to_server, leases)
        self._port = await server.start()
        for service in (self._service, LEASE_SERVICE):
            await server.set_serving(service, True)
        self._expiry = asyncio.create_task(self._release_expired(), name="leases")

    async def stop(self) -> None:
        """End the calls in flight, then close the servicer and its engine. Calling it again does nothing."""
        try:
            if self._expiry is not None:
                self._expiry.cancel()
            if self._server is not None:
                await self._server.stop(_GRACE_SECONDS)
        finally:
            await self._servicer.close()

    async def _release_expired(self) -> None:
        while True:
            await asyncio.sleep(self._servicer.leases.seconds / RENEWALS)
            try:
                await self._servicer.release_expired()
            except Exception:  # health checks report a lost device, and the worker is then replaced as a whole
                logger.exception("what a client left behind cannot be released")


def host_target(
    host: str,
    engine: StepEngine,
    access: PeerAccess = OPEN,
    *,
    lease_seconds: float = LEASE_SECONDS,
    hang_seconds: float = HANG_SECONDS,
    learning: Callable[[], LearningStatus] | None = None,
) -> WorkerHost:
    """Host `TargetService` over an engine, or over the driver rank of a group. The host closes the engine.

    `learning` says what the draft on the target has learned, where it learns.
    """
    servicer = TargetServicer(engine, Leases(lease_seconds), learning)
    add_to_server = target_pb2_grpc.add_TargetServiceServicer_to_server
    return WorkerHost(host, TARGET_SERVICE, servicer, add_to_server, access, hang_seconds)


def host_draft(
    host: str,
    method: DraftMethod,
    access: PeerAccess = OPEN,
    *,
    leases: Leases | None = None,
    hang_seconds: float = HANG_SECONDS,
    described: Sequence[DescribedMethod] = (),
    learner: Learner | None = None,
) -> WorkerHost:
    """Host `DraftService` over a drafting method. Idle work ends when the host stops.

    `described` are the methods that `method` consists of, for clients that ask. `learner` trains `method` and ends with
    the host.
    """
    servicer = DraftServicer(method, leases, described, learner)
    add_to_server = draft_pb2_grpc.add_DraftServiceServicer_to_server
    return WorkerHost(host, DRAFT_SERVICE, servicer, add_to_server, access, hang_seconds)
