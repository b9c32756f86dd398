"""`DraftService` over any drafting method."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc

from cluster.core.bounds import MAX_ROWS
from cluster.core.drafting import DraftRow, Proposal, RowFault
from cluster.core.errors import PilotfishError
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.wire.codec.common import decode_sequence_ids
from cluster.wire.codec.draft import decode_client, decode_draft_rows, encode_proposals
from pilotfish.v1 import draft_pb2, draft_pb2_grpc
from workers.draft.idle_work import IdleWork
from workers.serve.compute_thread import ComputeThread, compute_rows, count_failures
from workers.serve.leases import LEASE_SECONDS, Leases

logger = logging.getLogger(__name__)

CHECKS_PER_LEASE = 4


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Owns the method and the thread that it computes in. `WireServer` maps raised errors to gRPC status codes.

    A cancelled call that has not begun is not computed. One that has begun is finished, so that a repeated call is
    fast. Waiting calls are computed together, one per client, so that a client that calls more often does not delay
    the others. A call without any budget is answered when its committed tokens are computed, so that its duration
    shows their cost. Between calls the method may do idle work. What a client holds is released when the client has
    been silent for `lease_seconds`: it is gone, or it sends its tokens again.
    """

    def __init__(
        self,
        method: DraftMethod,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._method = method
        self._leases = Leases(lease_seconds, clock)
        self._lease_seconds = lease_seconds
        self._expiring: asyncio.Task[None] | None = None
        self._idle_work = method if isinstance(method, IdleWork) else None
        self._compute = ComputeThread("draft", None if self._idle_work is None else self._idle_work.run_ahead)
        self._lock = threading.Lock()
        self._waiting: list[_Call] = []

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftServiceProposeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[draft_pb2.DraftServiceProposeResponse]:
        """Commit tokens and propose drafts."""
        async for request in request_iterator:
            yield encode_proposals(await self._propose(_Call(decode_client(request), decode_draft_rows(request))))

    async def Release(
        self, request: draft_pb2.DraftServiceReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.DraftServiceReleaseResponse:
        """Free everything that is stored for the sequences."""
        client = decode_client(request)
        ids = [_qualified(client, sequence_id) for sequence_id in decode_sequence_ids(request.sequence_ids)]
        await self._compute.run_shielded(self._method.release, ids)
        self._leases.release(client, ids)
        return draft_pb2.DraftServiceReleaseResponse()

    @property
    def failures(self) -> int:
        """Consecutive calls that failed although no single row was the cause."""
        return self._compute.failures

    @property
    def busy_seconds(self) -> float:
        """How long the computation under way has been running, in seconds; 0 while there is none."""
        return self._compute.busy_seconds

    async def close(self) -> None:
        """Finish the computation that is under way and end the thread. Closing again does nothing."""
        if self._expiring is not None:
            self._expiring.cancel()
        await self._compute.close()

    async def release_expired(self) -> None:
        """Release what silent clients hold. It is called again and again once a client has called."""
        if expired := self._leases.take_expired():
            logger.warning("%d sequences of clients that are silent for %g s end", len(expired), self._lease_seconds)
            await self._compute.run_shielded(self._method.release, expired)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / CHECKS_PER_LEASE)
            try:
                await self.release_expired()
            except Exception:
                logger.exception("expired sequences could not be released")

    async def _propose(self, call: _Call) -> tuple[Proposal, ...]:
        if self._expiring is None:
            self._expiring = asyncio.create_task(self._expire(), name="leases")
        with self._leases.call(call.client, call.ids):
            return await self._compute_call(call)

    async def _compute_call(self, call: _Call) -> tuple[Proposal, ...]:
        with self._lock:
            self._waiting.append(call)
        try:
            proposals = await self._compute.run(self._answer, call)
        finally:
            self._remove(call)
        if call.is_without_budget:
            await self._catch_up(call.ids)
        return proposals

    async def _catch_up(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Compute committed tokens piece by piece, so that other clients' proposals run in between."""
        if self._idle_work is None:
            return
        try:
            while await self._compute.run(self._idle_work.catch_up, sequence_ids):
                pass
        except PilotfishError:
            raise
        except Exception:  # the next proposal computes the rest, and reports a faulty row
            logger.exception("committed tokens could not be computed; the next proposal computes the rest")

    def _answer(self, call: _Call) -> tuple[Proposal, ...]:
        """The call's proposals, computed with other waiting calls unless one of these did it. Runs in the thread."""
        if call.proposals is None:
            batch = self._take(call)
            rows = [row for each in batch for row in each.rows]
            proposals = iter(count_failures(self._compute, lambda: compute_rows(rows, self._method.propose, _faulted)))
            for each in batch:
                each.set_proposals([next(proposals) for _ in each.rows])
        return call.proposals or ()

    def _take(self, call: _Call) -> list[_Call]:
        """Remove the call, and the first waiting call of each other client, from the waiting ones."""
        batch = [call]
        clients = {call.client}
        rows = len(call.rows)
        with self._lock:
            for other in self._waiting:
                if other.client not in clients and rows + len(other.rows) <= MAX_ROWS:
                    clients.add(other.client)
                    rows += len(other.rows)
                    batch.append(other)
            self._waiting = [other for other in self._waiting if other not in batch]
        return batch

    def _remove(self, call: _Call) -> None:
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)


class _Call:
    """The rows of one call, under sequence ids that no other client has."""

    def __init__(self, client: str, rows: Sequence[DraftRow]) -> None:
        self.client = client
        self.rows = [replace(row, sequence_id=_qualified(client, row.sequence_id)) for row in rows]
        self.ids = [row.sequence_id for row in self.rows]
        self.is_without_budget = not any(row.budget.max_nodes for row in rows)
        self._client_ids = [row.sequence_id for row in rows]
        self.proposals: tuple[Proposal, ...] | None = None

    def set_proposals(self, proposals: Sequence[Proposal]) -> None:
        """Store the method's proposals for `rows` under the client's own sequence ids."""
        pairs = zip(proposals, self._client_ids, strict=True)
        self.proposals = tuple(replace(proposal, sequence_id=sequence_id) for proposal, sequence_id in pairs)


def _qualified(client: str, sequence_id: SequenceId) -> SequenceId:
    return SequenceId(f"{client}/{sequence_id}")


def _faulted(row: DraftRow, fault: RowFault) -> Proposal:
    return Proposal(row.sequence_id, row.base_len, fault=fault)
