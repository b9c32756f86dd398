"""Conversion between protobuf and types, for the messages of the draft service."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core import bounds
from cluster.core.drafting import DescribedMethod, DraftBudget, DraftRow, Proposal
from cluster.core.verification import LearningStatus
from cluster.wire.codec.common import decode_id, decode_start, encode_start
from cluster.wire.codec.learning import decode_learning, encode_learning
from cluster.wire.codec.proposal import (
    decode_evidences,
    decode_next_tokens,
    decode_proposal,
    encode_evidence,
    encode_listed,
    encode_proposal,
)
from pilotfish.v1 import draft_pb2 as pb


def encode_draft_rows(rows: Sequence[DraftRow], client: str = "") -> pb.DraftServiceProposeRequest:
    """Encode a request for drafts. `client` names the owner of the sequence ids."""
    return pb.DraftServiceProposeRequest(
        client=client,
        rows=[
            pb.DraftRow(
                sequence_id=row.sequence_id,
                base_len=row.base_len,
                new_tokens=row.new_tokens,
                max_nodes=row.budget.max_nodes,
                max_depth=row.budget.max_depth,
                start=encode_start(row.start) if row.start is not None else None,
                evidence=[encode_evidence(evidence) for evidence in row.evidence],
                forced_tokens=row.next_tokens.forced,
                following=None if row.next_tokens.listed is None else encode_listed(row.next_tokens.listed),
            )
            for row in rows
        ],
    )


def decode_draft_rows(message: pb.DraftServiceProposeRequest, prefix: str = "") -> tuple[DraftRow, ...]:
    """Decode the rows of a request for drafts, with the client's prefix before their ids. Raises `InvalidRequest`."""
    bounds.count("rows", message.rows, 0, bounds.MAX_ROWS)
    rows = tuple(_decode_row(row, f"rows[{index}]", prefix) for index, row in enumerate(message.rows))
    bounds.distinct_rows(row.sequence_id for row in message.rows)
    return rows


def _decode_row(row: pb.DraftRow, field: str, prefix: str) -> DraftRow:
    base_len = bounds.integer(f"{field}.base_len", row.base_len, 1, bounds.MAX_TOKENS)
    least = base_len if row.HasField("start") else 0
    return DraftRow(
        sequence_id=decode_id(f"{field}.sequence_id", row.sequence_id, prefix),
        base_len=base_len,
        new_tokens=bounds.tokens(f"{field}.new_tokens", row.new_tokens, least, base_len),
        budget=DraftBudget(
            bounds.integer(f"{field}.max_nodes", row.max_nodes, 0, bounds.MAX_TREE_NODES),
            bounds.integer(f"{field}.max_depth", row.max_depth, 0, bounds.MAX_TREE_DEPTH),
        ),
        start=decode_start(row.start, f"{field}.start") if row.HasField("start") else None,
        evidence=decode_evidences(row.evidence, f"{field}.evidence", base_len),
        next_tokens=decode_next_tokens(row, field),
    )


def encode_description(methods: Sequence[DescribedMethod], lease_seconds: float) -> pb.DraftServiceDescribeResponse:
    """Encode what a drafter drafts with, and how long its clients may be silent, in seconds."""
    return pb.DraftServiceDescribeResponse(
        methods=[
            pb.DraftMethodDescription(
                name=one.name, taps=len(one.needs.taps), top=one.needs.top, decisions=one.needs.decisions
            )
            for one in methods
        ],
        lease_seconds=lease_seconds,
    )


def encode_proposals(
    proposals: Sequence[Proposal], prefix: str = "", learning: LearningStatus | None = None
) -> pb.DraftServiceProposeResponse:
    """Encode proposals, without the client's prefix before the sequence ids, and what the drafter has learned."""
    return pb.DraftServiceProposeResponse(
        proposals=[encode_proposal(proposal, prefix) for proposal in proposals],
        learning=None if learning is None else encode_learning(learning),
    )


def decode_proposals(message: pb.DraftServiceProposeResponse) -> tuple[Proposal, ...]:
    """Decode proposals. Raises `InvalidRequest`."""
    bounds.count("proposals", message.proposals, 0, bounds.MAX_ROWS)
    return tuple(decode_proposal(entry, f"proposals[{index}]") for index, entry in enumerate(message.proposals))


def decode_learned(message: pb.DraftServiceProposeResponse) -> LearningStatus | None:
    """What the drafter has learned; `None` where it does not learn. Raises `InvalidRequest`."""
    return decode_learning(message.learning) if message.HasField("learning") else None
