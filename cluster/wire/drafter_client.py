"""The `Drafter` port over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from cluster.core.config.cluster_section import LEASE_SECONDS
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.errors import DrafterUnavailable, InvalidRequest, PilotfishError
from cluster.core.ids import SequenceId
from cluster.core.verification import LearningStatus
from cluster.wire.codec.draft import decode_learned, decode_proposals, encode_draft_rows
from cluster.wire.connection import SHORT_CALL_SECONDS, Connection, Resolve
from cluster.wire.lease import Lease
from cluster.wire.peer_access import OPEN, PeerAccess
from cluster.wire.stream_exchange import AnswerLost, StreamExchange
from pilotfish.v1 import draft_pb2, draft_pb2_grpc


class GrpcDrafter:
    """`cluster.core.ports.Drafter` over gRPC. A drafter separates the sequences of its clients."""

    def __init__(self, resolve: Resolve, access: PeerAccess = OPEN, lease_seconds: float = LEASE_SECONDS) -> None:
        self._connection = Connection(resolve, DrafterUnavailable, access=access)
        self._lease = Lease(self._connection, lease_seconds)
        self._learned: LearningStatus | None = None
        self._propose = StreamExchange(
            self._connection, lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Propose
        )

    @property
    def learned(self) -> LearningStatus | None:
        """What the drafter had learned at its last answer; `None` where it does not learn."""
        return self._learned

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        """Ask for one proposal per row. Raises `DrafterUnavailable`, also after `timeout_seconds`."""
        answer = await self._call(self._propose.on, encode_draft_rows(rows, self._lease.client), timeout_seconds)
        try:
            proposals, self._learned = decode_proposals(answer), decode_learned(answer)
            return proposals
        except InvalidRequest as error:
            raise DrafterUnavailable(f"the drafter's answer is invalid: {error}") from error

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        request = draft_pb2.DraftServiceReleaseRequest(sequence_ids=sequence_ids, client=self._lease.client)
        await self._call(lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Release, request, SHORT_CALL_SECONDS)

    async def close(self) -> None:
        """Close the connection."""
        self._lease.close()
        self._propose.close()
        await self._connection.close()

    async def _call(self, method: Callable[[grpc.aio.Channel], Any], request: Any, timeout_seconds: float) -> Any:
        """Call a method. The coordinator treats all faults of a drafter alike: it continues without drafts."""
        try:
            return await self._lease.call(method, request, timeout_seconds)
        except PilotfishError as error:
            raise DrafterUnavailable(str(error), had_call=isinstance(error.__cause__, AnswerLost)) from error
