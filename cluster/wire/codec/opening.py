"""Conversion between protobuf and types, for the opening of sequences on the target."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from cluster.core import bounds
from cluster.core.errors import InvalidRequest
from cluster.core.verification import OpenResult, OpenRow
from cluster.wire.codec.common import decode_id, decode_start, encode_start
from cluster.wire.codec.target_info import decode_occupancy, encode_occupancy
from pilotfish.v1 import target_pb2 as pb


def encode_open_rows(rows: Sequence[OpenRow], client: str = "") -> pb.TargetServiceOpenRequest:
    """Encode sequences to open. `client` names the owner of the sequence ids."""
    return pb.TargetServiceOpenRequest(
        client=client,
        rows=[
            pb.OpenRow(
                sequence_id=row.sequence_id,
                tokens=row.tokens,
                start=encode_start(row.start),
                parent=row.parent or "",
            )
            for row in rows
        ],
    )


def decode_open_rows(message: pb.TargetServiceOpenRequest, prefix: str = "") -> tuple[OpenRow, ...]:
    """Decode sequences to open, with the client's prefix before their ids. Raises `InvalidRequest`."""
    bounds.count("rows", message.rows, 0, bounds.MAX_ROWS)
    rows = tuple(_decode_open_row(row, f"rows[{index}]", prefix) for index, row in enumerate(message.rows))
    bounds.distinct_rows(row.sequence_id for row in rows)
    return rows


def _decode_open_row(row: pb.OpenRow, field: str, prefix: str) -> OpenRow:
    return OpenRow(
        sequence_id=decode_id(f"{field}.sequence_id", row.sequence_id, prefix),
        tokens=bounds.tokens(f"{field}.tokens", row.tokens, 1, bounds.MAX_TOKENS),
        start=decode_start(row.start, f"{field}.start"),
        parent=decode_id(f"{field}.parent", row.parent, prefix) if row.parent else None,
    )


def open_rows_to_bytes(rows: Sequence[OpenRow]) -> bytes:
    """Serialize sequences to open, for the other ranks of a target."""
    return encode_open_rows(rows).SerializeToString()


def open_rows_from_bytes(data: bytes) -> tuple[OpenRow, ...]:
    """Deserialize sequences to open. Raises `InvalidRequest`."""
    try:
        return decode_open_rows(pb.TargetServiceOpenRequest.FromString(data))
    except DecodeError as error:
        raise InvalidRequest("rows", f"{len(data)} bytes", "a TargetServiceOpenRequest message") from error


def encode_open_result(result: OpenResult) -> pb.TargetServiceOpenResponse:
    """Encode the result of opening sequences."""
    return pb.TargetServiceOpenResponse(stored_lens=result.stored_lens, kv=encode_occupancy(result.kv))


def decode_open_result(message: pb.TargetServiceOpenResponse) -> OpenResult:
    """Decode the result of opening sequences. Raises `InvalidRequest`."""
    bounds.count("stored_lens", message.stored_lens, 0, bounds.MAX_ROWS)
    lens = bounds.integers("stored_lens", message.stored_lens, 0, bounds.MAX_TOKENS)
    return OpenResult(lens, decode_occupancy(message.kv))
