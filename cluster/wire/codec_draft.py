"""The drafter's messages: proto ↔ types."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId
from cluster.core.types import DraftBudget, DraftRow, Proposal
from cluster.wire import bounds
from cluster.wire.codec_common import (
    decode_fault,
    decode_start,
    decode_tree,
    encode_fault,
    encode_start,
    encode_tree,
)
from pilotfish.v1 import draft_pb2 as pb


def encode_draft_rows(rows: Sequence[DraftRow]) -> pb.DraftServiceProposeRequest:
    """See `decode_draft_rows`."""
    return pb.DraftServiceProposeRequest(
        rows=[
            pb.DraftRow(
                sequence_id=row.sequence_id,
                base_len=row.base_len,
                new_tokens=row.new_tokens,
                max_nodes=row.budget.max_nodes,
                max_depth=row.budget.max_depth,
                start=encode_start(row.start) if row.start is not None else None,
            )
            for row in rows
        ]
    )


def decode_draft_rows(message: pb.DraftServiceProposeRequest) -> tuple[DraftRow, ...]:
    """Raises `InvalidRequest`."""
    bounds.count("rows", message.rows, 0, bounds.MAX_ROWS)
    seen: set[str] = set()
    rows = []
    for index, row in enumerate(message.rows):
        if row.sequence_id in seen:
            raise InvalidRequest(f"rows[{index}].sequence_id", row.sequence_id, "in one row only")
        seen.add(row.sequence_id)
        rows.append(_decode_row(row, f"rows[{index}]"))
    return tuple(rows)


def _decode_row(row: pb.DraftRow, field: str) -> DraftRow:
    base_len = bounds.whole(f"{field}.base_len", row.base_len, 1, bounds.MAX_TOKENS)
    least = base_len if row.HasField("start") else 0
    return DraftRow(
        sequence_id=SequenceId(bounds.identifier(f"{field}.sequence_id", row.sequence_id)),
        base_len=base_len,
        new_tokens=bounds.tokens(f"{field}.new_tokens", row.new_tokens, least, base_len),
        budget=DraftBudget(
            bounds.whole(f"{field}.max_nodes", row.max_nodes, 0, bounds.MAX_TREE_NODES),
            bounds.whole(f"{field}.max_depth", row.max_depth, 0, bounds.MAX_TREE_DEPTH),
        ),
        start=decode_start(row.start, f"{field}.start") if row.HasField("start") else None,
    )


def encode_proposals(proposals: Sequence[Proposal]) -> pb.DraftServiceProposeResponse:
    """See `decode_proposals`."""
    return pb.DraftServiceProposeResponse(
        proposals=[
            pb.Proposal(
                sequence_id=proposal.sequence_id,
                base_len=proposal.base_len,
                tree=encode_tree(proposal.tree),
                fault=encode_fault(proposal.fault) if proposal.fault is not None else None,
            )
            for proposal in proposals
        ]
    )


def decode_proposals(message: pb.DraftServiceProposeResponse) -> tuple[Proposal, ...]:
    """Raises `InvalidRequest`."""
    bounds.count("proposals", message.proposals, 0, bounds.MAX_ROWS)
    return tuple(
        Proposal(
            sequence_id=SequenceId(bounds.identifier(f"proposals[{index}].sequence_id", entry.sequence_id)),
            base_len=bounds.whole(f"proposals[{index}].base_len", entry.base_len, 1, bounds.MAX_TOKENS),
            tree=decode_tree(entry.tree, f"proposals[{index}].tree"),
            fault=decode_fault(entry.fault, f"proposals[{index}].fault") if entry.HasField("fault") else None,
        )
        for index, entry in enumerate(message.proposals)
    )
