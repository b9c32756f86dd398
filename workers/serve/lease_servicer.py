"""`LeaseService`, and the servicers of workers whose clients hold leases."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from cluster.core.ids import SequenceId
from cluster.wire.codec.common import decode_client
from pilotfish.v1 import lease_pb2, lease_pb2_grpc
from workers.serve.compute_thread import ComputeThread
from workers.serve.leases import Leases

Released = TypeVar("Released")


class LeaseServicer(lease_pb2_grpc.LeaseServiceServicer):
    """Renews leases. It is answered in the event loop, also while the worker computes."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    async def Renew(
        self, request: lease_pb2.RenewRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> lease_pb2.RenewResponse:
        """Keep what the client stores on this worker."""
        with self._leases.call(decode_client(request.client)):
            return lease_pb2.RenewResponse()


class LeasedServicer(Generic[Released]):
    """A servicer that computes in one thread. What a client stores belongs to its lease."""

    def __init__(
        self, compute: ComputeThread, release: Callable[[Sequence[SequenceId]], Released], leases: Leases | None
    ) -> None:
        """`release` frees sequences. It is called in the thread."""
        self.leases = leases or Leases()
        """The leases of the clients."""
        self._compute = compute
        self._release = release

    @property
    def failures(self) -> int:
        """Consecutive computations that failed although no single row was the cause."""
        return self._compute.failures

    @property
    def busy_seconds(self) -> float:
        """How long the computation under way has been running, in seconds; 0 while there is none."""
        return self._compute.busy_seconds

    async def release_expired(self) -> None:
        """Free what clients with an ended lease stored."""
        if self.leases.has_expired:
            await self._compute.run_shielded(lambda: self._release(self.leases.expire()))

    @abstractmethod
    async def close(self) -> None:
        """Finish the computation that is under way and end the thread. Closing again does nothing."""

    def _release_of(self, client: str, sequence_ids: Sequence[SequenceId]) -> Released:
        self.leases.forget(client, sequence_ids)
        return self._release(sequence_ids)
