"""`DraftService` over any drafting method."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from cluster.core.bounds import MAX_ROWS
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.errors import PilotfishError
from cluster.core.ids import SequenceId
from cluster.core.verification import RowFault
from cluster.wire.codec_common import decode_sequence_ids
from cluster.wire.codec_draft import decode_client, decode_draft_rows, encode_proposals
from pilotfish.v1 import draft_pb2, draft_pb2_grpc
from workers.draft.registry import DraftMethod
from workers.serve.compute_thread import ComputeThread, compute_rows, counted

logger = logging.getLogger(__name__)


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Owns the method and the thread it computes in. Errors are raised as they are; the server maps them.

    A proposal that nobody waits for any more is not begun; one that was begun is finished, so that
    asking again finds it nearly done. Calls that wait together are computed together, one of each client: nobody
    waits longer because another asks more often. A call that asks for nothing is answered once its sequences have been
    learned, so that its length tells what that costs. While no call waits, the method grows what may be asked for next.
    """

    def __init__(self, method: DraftMethod) -> None:
        self._method = method
        self._compute = ComputeThread("draft", method.grow)
        self._lock = threading.Lock()
        self._waiting: list[_Call] = []

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftServiceProposeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[draft_pb2.DraftServiceProposeResponse]:
        """Commit and guess."""
        async for request in request_iterator:
            yield encode_proposals(await self._propose(_Call(decode_client(request), decode_draft_rows(request))))

    async def Release(
        self, request: draft_pb2.DraftServiceReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.DraftServiceReleaseResponse:
        """Forget sequences."""
        client = decode_client(request)
        ids = [_own(client, sequence_id) for sequence_id in decode_sequence_ids(request.sequence_ids)]
        await self._compute.run_surely(self._method.release, ids)
        return draft_pb2.DraftServiceReleaseResponse()

    @property
    def failures(self) -> int:
        """Proposals in a row that failed for no row's fault."""
        return self._compute.failures

    async def close(self) -> None:
        """Finish what is under way and close the method. Closing again does nothing."""
        await self._compute.close(self._method.close)

    async def _propose(self, call: _Call) -> tuple[Proposal, ...]:
        with self._lock:
            self._waiting.append(call)
        try:
            proposals = await self._compute.run(self._answer, call)
        finally:
            self._forget(call)
        if call.only_tells:
            await self._learn(call.ids)
        return proposals

    async def _learn(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Piece by piece, so that others' proposals go in between."""
        try:
            while await self._compute.run(self._method.learn, sequence_ids):
                pass
        except PilotfishError:
            raise
        except Exception:  # computed with the guesses that are asked for next, the culprit will be found alone
            logger.exception("learning has failed: what is left goes through with the next proposal")

    def _answer(self, call: _Call) -> tuple[Proposal, ...]:
        """On the computing thread: the call's proposals, computed with others that wait unless others have done it."""
        if call.proposals is None:
            batch = self._take(call)
            rows = [row for each in batch for row in each.rows]
            proposals = iter(counted(self._compute, lambda: compute_rows(rows, self._method.propose, _faulted)))
            for each in batch:
                each.take([next(proposals) for _ in each.rows])
        return call.proposals or ()

    def _take(self, call: _Call) -> list[_Call]:
        """The call, and the first one that waits of each other client."""
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

    def _forget(self, call: _Call) -> None:
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)


class _Call:
    """Rows under names that no other client's have."""

    def __init__(self, client: str, rows: Sequence[DraftRow]) -> None:
        self.client = client
        self.rows = [replace(row, sequence_id=_own(client, row.sequence_id)) for row in rows]
        self.ids = [row.sequence_id for row in self.rows]
        self.only_tells = not any(row.budget.max_nodes for row in rows)
        self._names = [row.sequence_id for row in rows]
        self.proposals: tuple[Proposal, ...] | None = None

    def take(self, proposals: Sequence[Proposal]) -> None:
        """The method's answers to `rows`."""
        named = zip(proposals, self._names, strict=True)
        self.proposals = tuple(replace(proposal, sequence_id=sequence_id) for proposal, sequence_id in named)


def _own(client: str, sequence_id: SequenceId) -> SequenceId:
    return SequenceId(f"{client}/{sequence_id}")


def _faulted(row: DraftRow, fault: RowFault) -> Proposal:
    return Proposal(row.sequence_id, row.base_len, fault=fault)
