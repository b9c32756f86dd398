"""`DraftService` over any drafting method."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from cluster.core.bounds import MAX_ROWS
from cluster.core.drafting import DescribedMethod, DraftRow, Proposal, RowFault, RowFaultCode
from cluster.core.errors import PilotfishError
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.wire.codec.common import decode_client, decode_sequence_ids
from cluster.wire.codec.draft import decode_draft_rows, encode_description, encode_proposals
from pilotfish.v1 import draft_pb2, draft_pb2_grpc
from workers.draft.common.idle_work import IdleWork
from workers.serve.compute_thread import ComputeThread, compute_rows, count_failures
from workers.serve.lease_servicer import LeasedServicer, Leases

if TYPE_CHECKING:
    from workers.serve.learning.learner import Learner

logger = logging.getLogger(__name__)


class DraftServicer(LeasedServicer[None], draft_pb2_grpc.DraftServiceServicer):
    """Owns the method and the thread that it computes in. `WireServer` maps raised errors to gRPC status codes.

    A cancelled call that has not begun is not computed. One that has begun is finished, so that a repeated call is
    fast. Waiting calls are computed together, one per client, so that a client that calls more often does not delay
    the others. A call without any budget is answered when its committed tokens are computed, so that its duration
    shows their cost. Between calls the method may do idle work. Sequences belong to the lease of the client that stored
    them.
    """

    def __init__(
        self,
        method: DraftMethod,
        leases: Leases | None = None,
        described: Sequence[DescribedMethod] = (),
        learner: Learner | None = None,
    ) -> None:
        """`described` are the methods that `method` consists of, for clients that ask.

        `learner` trains `method` and says what it has learned; it is closed with this servicer.
        """
        self._method = method
        self._learner = learner
        self._described = tuple(described)
        self._idle_work = method if isinstance(method, IdleWork) else None
        idle_work = None if self._idle_work is None else self._idle_work.run_ahead
        super().__init__(ComputeThread("draft", idle_work), self._forget, leases)
        self._lock = threading.Lock()
        self._waiting: list[_Call] = []
        self._failed: set[SequenceId] = set()
        """Sequences whose latest row failed in a call of its own."""

    async def Describe(
        self, request: draft_pb2.DraftServiceDescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.DraftServiceDescribeResponse:
        """Tell what this drafter drafts with."""
        return encode_description(self._described, self.leases.seconds)

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftServiceProposeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[draft_pb2.DraftServiceProposeResponse]:
        """Commit tokens and propose drafts."""
        async for request in request_iterator:
            client = decode_client(request.client)
            call = _Call(client, decode_draft_rows(request, client))
            with self.leases.call(client):
                proposals = await self._propose(call)
            yield encode_proposals(proposals, client, None if self._learner is None else self._learner.status())

    async def Release(
        self, request: draft_pb2.DraftServiceReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.DraftServiceReleaseResponse:
        """Free everything that is stored for the sequences."""
        client = decode_client(request.client)
        sequence_ids = decode_sequence_ids(request.sequence_ids, prefix=client)
        with self.leases.call(client):
            await self._compute.run_shielded(self._release_of, client, sequence_ids)
        return draft_pb2.DraftServiceReleaseResponse()

    async def close(self) -> None:
        """Finish the computation that is under way, and end the thread and the learner.

        Closing again does nothing.
        """
        if self._learner is not None:
            await asyncio.to_thread(self._learner.close)
        await self._compute.close()

    async def _propose(self, call: _Call) -> tuple[Proposal, ...]:
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
            for each in batch:
                self.leases.store(each.client, each.ids)
            proposals = iter(self._computed(rows))
            for each in batch:
                each.proposals = tuple(next(proposals) for _ in each.rows)
        return call.proposals or ()

    def _computed(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        """The proposals for the rows. The error of a single row is a fault of it, and counts as a failure as well.

        The sequence is sent again after its first error, which may pass. After the second one it has no drafts here.
        """
        ids = [row.sequence_id for row in rows]
        try:
            proposals = count_failures(self._compute, lambda: compute_rows(rows, self._method.propose, _faulted))
        except PilotfishError:
            raise
        except Exception as error:
            if len(rows) > 1:
                raise
            logger.exception("a call with one row failed")
            code = RowFaultCode.INVALID if self._failed.issuperset(ids) else RowFaultCode.OUT_OF_SYNC
            self._failed.update(ids)
            fault = RowFault(code, f"this row cannot be computed ({type(error).__name__})")
            return [_faulted(row, fault) for row in rows]
        self._failed.difference_update(ids)
        return proposals

    def _forget(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._failed.difference_update(sequence_ids)
        self._method.release(sequence_ids)

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
        self.rows = rows
        self.ids = [row.sequence_id for row in rows]
        self.is_without_budget = not any(row.budget.max_nodes for row in rows)
        self.proposals: tuple[Proposal, ...] | None = None


def _faulted(row: DraftRow, fault: RowFault) -> Proposal:
    return Proposal(row.sequence_id, row.base_len, fault=fault)
