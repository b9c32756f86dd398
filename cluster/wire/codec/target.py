"""Conversion between protobuf and types, for the messages of the target service."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from cluster.core import bounds
from cluster.core.drafting import DraftBudget
from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId
from cluster.core.request import TokenLogprobs
from cluster.core.verification import (
    OpenResult,
    OpenRow,
    StepBatch,
    StepResult,
    Verdict,
    VerifyRow,
)
from cluster.wire.codec.common import (
    decode_fault,
    decode_id,
    decode_logprobs,
    decode_start,
    decode_tree,
    encode_fault,
    encode_logprobs,
    encode_start,
    encode_tree,
)
from cluster.wire.codec.proposal import (
    decode_distributions,
    decode_evidence,
    decode_proposal,
    encode_distributions,
    encode_evidence,
    encode_proposal,
)
from cluster.wire.codec.target_info import decode_occupancy, encode_occupancy
from pilotfish.v1 import common_pb2
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
    seen: set[SequenceId] = set()
    for index, row in enumerate(rows):
        if row.sequence_id in seen:
            raise InvalidRequest(f"rows[{index}].sequence_id", row.sequence_id, "in one row only")
        seen.add(row.sequence_id)
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
    lens = tuple(
        bounds.integer(f"stored_lens[{index}]", length, 0, bounds.MAX_TOKENS)
        for index, length in enumerate(message.stored_lens)
    )
    return OpenResult(lens, decode_occupancy(message.kv))


def encode_step_batch(batch: StepBatch, client: str = "") -> pb.TargetServiceStepRequest:
    """Encode the rows of a step. `client` names the owner of the sequence ids."""
    return pb.TargetServiceStepRequest(
        client=client,
        rows=[
            pb.VerifyRow(
                sequence_id=row.sequence_id,
                base_len=row.base_len,
                pending=row.pending,
                tree=encode_tree(row.tree) if row.tree else None,
                decide=row.decide,
                start=encode_start(row.start) if row.start is not None else None,
                distributions=encode_distributions(row.distributions),
                next_max_nodes=row.next_budget.max_nodes,
                next_max_depth=row.next_budget.max_depth,
            )
            for row in batch.rows
        ],
    )


def decode_step_batch(message: pb.TargetServiceStepRequest, prefix: str = "") -> StepBatch:
    """Decode the rows of a step, with the client's prefix before their ids. Raises `InvalidRequest`."""
    bounds.count("rows", message.rows, 0, bounds.MAX_ROWS)
    return StepBatch(tuple(_decode_row(row, f"rows[{index}]", prefix) for index, row in enumerate(message.rows)))


def _decode_row(row: pb.VerifyRow, field: str, prefix: str) -> VerifyRow:
    base_len = bounds.integer(f"{field}.base_len", row.base_len, 1, bounds.MAX_TOKENS)
    tree = decode_tree(row.tree, f"{field}.tree")
    if tree and not row.decide:
        raise InvalidRequest(f"{field}.tree", f"{len(tree)} nodes", "empty if decide is false")
    return VerifyRow(
        sequence_id=decode_id(f"{field}.sequence_id", row.sequence_id, prefix),
        base_len=base_len,
        pending=bounds.tokens(f"{field}.pending", row.pending, 1, base_len),
        tree=tree,
        decide=row.decide,
        start=decode_start(row.start, f"{field}.start") if row.HasField("start") else None,
        distributions=decode_distributions(row.distributions, tree, f"{field}.distributions"),
        next_budget=DraftBudget(
            bounds.integer(f"{field}.next_max_nodes", row.next_max_nodes, 0, bounds.MAX_TREE_NODES),
            bounds.integer(f"{field}.next_max_depth", row.next_max_depth, 0, bounds.MAX_TREE_DEPTH),
        ),
    )


def step_batch_to_bytes(batch: StepBatch) -> bytes:
    """Serialize the rows of a step, for the other ranks of a target."""
    return encode_step_batch(batch).SerializeToString()


def step_batch_from_bytes(data: bytes) -> StepBatch:
    """Deserialize the rows of a step. Raises `InvalidRequest`."""
    try:
        return decode_step_batch(pb.TargetServiceStepRequest.FromString(data))
    except DecodeError as error:
        raise InvalidRequest("batch", f"{len(data)} bytes", "a TargetServiceStepRequest message") from error


def encode_step_result(result: StepResult, prefix: str = "") -> pb.TargetServiceStepResponse:
    """Encode the result of a step, without the client's prefix before the sequence ids."""
    return pb.TargetServiceStepResponse(
        verdicts=[
            pb.Verdict(
                sequence_id=verdict.sequence_id.removeprefix(prefix),
                base_len=verdict.base_len,
                tokens=verdict.tokens,
                drafted=verdict.drafted,
                logprobs=[encode_logprobs(entry) for entry in verdict.logprobs],
                prompt_logprobs=[encode_logprobs(entry) for entry in verdict.prompt_logprobs],
                fault=encode_fault(verdict.fault) if verdict.fault is not None else None,
                evidence=encode_evidence(verdict.evidence) if verdict.evidence is not None else None,
                proposal=encode_proposal(verdict.proposal, prefix) if verdict.proposal is not None else None,
                forced_tokens=verdict.forced,
            )
            for verdict in result.verdicts
        ],
        kv=encode_occupancy(result.kv),
        step_seconds=result.step_seconds,
        draft_seconds=result.draft_seconds,
    )


def decode_step_result(message: pb.TargetServiceStepResponse) -> StepResult:
    """Decode the result of a step. Raises `InvalidRequest`."""
    bounds.count("verdicts", message.verdicts, 0, bounds.MAX_ROWS)
    return StepResult(
        verdicts=tuple(_decode_verdict(entry, f"verdicts[{index}]") for index, entry in enumerate(message.verdicts)),
        kv=decode_occupancy(message.kv),
        step_seconds=bounds.number("step_seconds", message.step_seconds, 0.0, bounds.MAX_STEP_SECONDS),
        draft_seconds=bounds.number("draft_seconds", message.draft_seconds, 0.0, bounds.MAX_STEP_SECONDS),
    )


def _decode_verdict(verdict: pb.Verdict, field: str) -> Verdict:
    drafted = bounds.integer(f"{field}.drafted", verdict.drafted, 0, bounds.MAX_TREE_NODES)
    tokens = bounds.tokens(f"{field}.tokens", verdict.tokens, 0, drafted + 1)
    return Verdict(
        sequence_id=decode_id(f"{field}.sequence_id", verdict.sequence_id),
        base_len=bounds.integer(f"{field}.base_len", verdict.base_len, 1, bounds.MAX_TOKENS),
        tokens=tokens,
        drafted=drafted,
        logprobs=_decode_logprobs(verdict.logprobs, f"{field}.logprobs", len(tokens), len(tokens)),
        prompt_logprobs=_decode_logprobs(verdict.prompt_logprobs, f"{field}.prompt_logprobs", 0, verdict.base_len),
        fault=decode_fault(verdict.fault, f"{field}.fault") if verdict.HasField("fault") else None,
        evidence=decode_evidence(verdict.evidence, f"{field}.evidence") if verdict.HasField("evidence") else None,
        proposal=decode_proposal(verdict.proposal, f"{field}.proposal") if verdict.HasField("proposal") else None,
        forced=bounds.tokens(f"{field}.forced_tokens", verdict.forced_tokens, 0, bounds.MAX_TREE_DEPTH),
    )


def _decode_logprobs(
    entries: Sequence[common_pb2.TokenLogprobs], field: str, least: int, most: int
) -> tuple[TokenLogprobs, ...]:
    """Decode no entries, or between `least` and `most`. Raises `InvalidRequest`."""
    if not entries:
        return ()
    bounds.count(field, entries, least, most)
    return tuple(decode_logprobs(entry, f"{field}[{index}]") for index, entry in enumerate(entries))
