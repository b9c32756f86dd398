"""`DraftService` over any drafting method."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from cluster.core.types import DraftRow, Proposal, RowFault
from cluster.wire.codec import decode_draft_rows, decode_sequence_ids, encode_proposals
from pilotfish.v1 import draft_pb2, draft_pb2_grpc
from workers.draft.method import DraftMethod
from workers.serve.compute import ComputeThread, compute_rows, counted


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Owns the method and the thread it computes in. Errors are raised as they are; the server maps them.

    A proposal that nobody waits for any more is not begun; one that was begun is finished, so that
    asking again finds it nearly done.
    """

    def __init__(self, method: DraftMethod) -> None:
        self._method = method
        self._compute = ComputeThread("draft")

    async def Propose(
        self, request: draft_pb2.DraftServiceProposeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.DraftServiceProposeResponse:
        """Commit and guess."""
        rows = decode_draft_rows(request)
        return encode_proposals(await self._compute.run(self._propose, rows))

    async def Release(
        self, request: draft_pb2.DraftServiceReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.DraftServiceReleaseResponse:
        """Forget sequences."""
        await self._compute.run_surely(self._method.release, decode_sequence_ids(request.sequence_ids))
        return draft_pb2.DraftServiceReleaseResponse()

    @property
    def failures(self) -> int:
        """Proposals in a row that failed for no row's fault."""
        return self._compute.failures

    async def close(self) -> None:
        """Finish what is under way and close the method. Closing again does nothing."""
        await self._compute.close(self._method.close)

    def _propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        return counted(self._compute, lambda: compute_rows(rows, self._method.propose, _faulted))


def _faulted(row: DraftRow, fault: RowFault) -> Proposal:
    return Proposal(row.sequence_id, row.base_len, fault=fault)
