"""The leases of a worker's clients, `LeaseService`, and the servicers of workers whose clients hold leases."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import grpc

from cluster.core.config.cluster_section import LEASE_SECONDS
from cluster.core.ids import SequenceId
from cluster.wire.codec.common import decode_client
from pilotfish.v1 import lease_pb2, lease_pb2_grpc
from workers.serve.compute_thread import ComputeThread

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


class Leases:
    """What a client stores on a worker belongs to its lease, which every call renews. Used by several threads.

    Clients are named by the prefix of their sequence ids.
    """

    def __init__(self, seconds: float = LEASE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        """How long a client may be silent, in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}

    @contextmanager
    def call(self, client: str) -> Iterator[None]:
        """Renew the client's lease, and keep it for as long as the block runs."""
        with self._lock:
            lease = self._leases.setdefault(client, _Lease())
            lease.calls += 1
        try:
            yield
        finally:
            with self._lock:
                lease.calls -= 1
                lease.renewed_at = self._clock()

    def store(self, client: str, sequence_ids: Iterable[SequenceId]) -> None:
        """Record that a call of the client stores these sequences. The call is under way."""
        with self._lock:
            self._leases.setdefault(client, _Lease(self._clock())).sequence_ids.update(sequence_ids)

    def stored(self, client: str) -> tuple[SequenceId, ...]:
        """The sequences that the client stores here."""
        with self._lock:
            lease = self._leases.get(client)
            return () if lease is None else tuple(lease.sequence_ids)

    @property
    def is_empty(self) -> bool:
        """Whether no client stores a sequence here."""
        with self._lock:
            return not any(lease.sequence_ids for lease in self._leases.values())

    def forget(self, client: str, sequence_ids: Iterable[SequenceId]) -> None:
        """Record that the client has released these sequences."""
        with self._lock:
            lease = self._leases.get(client)
            if lease is not None:
                lease.sequence_ids.difference_update(sequence_ids)

    @property
    def has_expired(self) -> bool:
        """Whether `expire` would end a lease."""
        with self._lock:
            return any(self._is_over(lease) for lease in self._leases.values())

    def expire(self) -> tuple[SequenceId, ...]:
        """End the leases of clients that have been silent for too long. Returns the sequences that they stored."""
        with self._lock:
            over = [client for client, lease in self._leases.items() if self._is_over(lease)]
            return tuple(sequence_id for client in over for sequence_id in self._leases.pop(client).sequence_ids)

    def _is_over(self, lease: _Lease) -> bool:
        return not lease.calls and self._clock() - lease.renewed_at > self.seconds


class _Lease:
    def __init__(self, renewed_at: float = 0.0) -> None:
        self.renewed_at = renewed_at
        self.calls = 0
        """Number of calls under way."""
        self.sequence_ids: set[SequenceId] = set()
