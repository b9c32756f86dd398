"""Conversion between protobuf and types, for the messages of the target service."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from cluster.core import bounds
from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId
from cluster.core.kv import KvGroup, KvLayout, KvOccupancy
from cluster.core.verification import (
    OpenResult,
    OpenRow,
    StepBatch,
    StepResult,
    StepSample,
    TargetInfo,
    Verdict,
    VerifyRow,
)
from cluster.wire.codec_common import (
    decode_fault,
    decode_logprobs,
    decode_start,
    decode_tree,
    encode_fault,
    encode_logprobs,
    encode_start,
    encode_tree,
)
from pilotfish.v1 import target_pb2 as pb


def encode_open_rows(rows: Sequence[OpenRow]) -> pb.TargetServiceOpenRequest:
    """Encode sequences to open."""
    return pb.TargetServiceOpenRequest(
        rows=[
            pb.OpenRow(
                sequence_id=row.sequence_id,
                tokens=row.tokens,
                start=encode_start(row.start),
                parent=row.parent or "",
            )
            for row in rows
        ]
    )


def decode_open_rows(message: pb.TargetServiceOpenRequest) -> tuple[OpenRow, ...]:
    """Decode sequences to open. Raises `InvalidRequest`."""
    bounds.count("rows", message.rows, 0, bounds.MAX_ROWS)
    rows = tuple(_decode_open_row(row, f"rows[{index}]") for index, row in enumerate(message.rows))
    seen: set[SequenceId] = set()
    for index, row in enumerate(rows):
        if row.sequence_id in seen:
            raise InvalidRequest(f"rows[{index}].sequence_id", row.sequence_id, "in one row only")
        seen.add(row.sequence_id)
    return rows


def _decode_open_row(row: pb.OpenRow, field: str) -> OpenRow:
    return OpenRow(
        sequence_id=SequenceId(bounds.identifier(f"{field}.sequence_id", row.sequence_id)),
        tokens=bounds.tokens(f"{field}.tokens", row.tokens, 1, bounds.MAX_TOKENS),
        start=decode_start(row.start, f"{field}.start"),
        parent=SequenceId(bounds.identifier(f"{field}.parent", row.parent)) if row.parent else None,
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


def encode_step_batch(batch: StepBatch) -> pb.TargetServiceStepRequest:
    """Encode the rows of a step."""
    return pb.TargetServiceStepRequest(
        rows=[
            pb.VerifyRow(
                sequence_id=row.sequence_id,
                base_len=row.base_len,
                pending=row.pending,
                tree=encode_tree(row.tree),
                decide=row.decide,
                start=encode_start(row.start) if row.start is not None else None,
            )
            for row in batch.rows
        ]
    )


def decode_step_batch(message: pb.TargetServiceStepRequest) -> StepBatch:
    """Decode the rows of a step. Raises `InvalidRequest`."""
    bounds.count("rows", message.rows, 0, bounds.MAX_ROWS)
    return StepBatch(tuple(_decode_row(row, f"rows[{index}]") for index, row in enumerate(message.rows)))


def _decode_row(row: pb.VerifyRow, field: str) -> VerifyRow:
    base_len = bounds.integer(f"{field}.base_len", row.base_len, 1, bounds.MAX_TOKENS)
    tree = decode_tree(row.tree, f"{field}.tree")
    if tree and not row.decide:
        raise InvalidRequest(f"{field}.tree", f"{len(tree)} nodes", "empty if decide is false")
    return VerifyRow(
        sequence_id=SequenceId(bounds.identifier(f"{field}.sequence_id", row.sequence_id)),
        base_len=base_len,
        pending=bounds.tokens(f"{field}.pending", row.pending, 1, base_len),
        tree=tree,
        decide=row.decide,
        start=decode_start(row.start, f"{field}.start") if row.HasField("start") else None,
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


def encode_step_result(result: StepResult) -> pb.TargetServiceStepResponse:
    """Encode the result of a step."""
    return pb.TargetServiceStepResponse(
        verdicts=[
            pb.Verdict(
                sequence_id=verdict.sequence_id,
                base_len=verdict.base_len,
                tokens=verdict.tokens,
                drafted=verdict.drafted,
                logprobs=[encode_logprobs(entry) for entry in verdict.logprobs],
                fault=encode_fault(verdict.fault) if verdict.fault is not None else None,
            )
            for verdict in result.verdicts
        ],
        kv=encode_occupancy(result.kv),
        step_seconds=result.step_seconds,
    )


def decode_step_result(message: pb.TargetServiceStepResponse) -> StepResult:
    """Decode the result of a step. Raises `InvalidRequest`."""
    bounds.count("verdicts", message.verdicts, 0, bounds.MAX_ROWS)
    return StepResult(
        verdicts=tuple(_decode_verdict(entry, f"verdicts[{index}]") for index, entry in enumerate(message.verdicts)),
        kv=decode_occupancy(message.kv),
        step_seconds=bounds.number("step_seconds", message.step_seconds, 0.0, bounds.MAX_STEP_SECONDS),
    )


def _decode_verdict(verdict: pb.Verdict, field: str) -> Verdict:
    drafted = bounds.integer(f"{field}.drafted", verdict.drafted, 0, bounds.MAX_TREE_NODES)
    tokens = bounds.tokens(f"{field}.tokens", verdict.tokens, 0, drafted + 1)
    if verdict.logprobs:
        bounds.count(f"{field}.logprobs", verdict.logprobs, len(tokens), len(tokens))
    return Verdict(
        sequence_id=SequenceId(bounds.identifier(f"{field}.sequence_id", verdict.sequence_id)),
        base_len=bounds.integer(f"{field}.base_len", verdict.base_len, 1, bounds.MAX_TOKENS),
        tokens=tokens,
        drafted=drafted,
        logprobs=tuple(
            decode_logprobs(entry, f"{field}.logprobs[{index}]") for index, entry in enumerate(verdict.logprobs)
        ),
        fault=decode_fault(verdict.fault, f"{field}.fault") if verdict.HasField("fault") else None,
    )


def encode_occupancy(kv: KvOccupancy) -> pb.KvOccupancy:
    """Encode the occupancy of the KV pool."""
    return pb.KvOccupancy(blocks_total=kv.blocks_total, blocks_free=kv.blocks_free)


def decode_occupancy(message: pb.KvOccupancy, field: str = "kv") -> KvOccupancy:
    """Decode the occupancy of the KV pool. Raises `InvalidRequest`."""
    free = bounds.integer(f"{field}.blocks_free", message.blocks_free, 0, message.blocks_total)
    return KvOccupancy(message.blocks_total, free)


def encode_target_info(info: TargetInfo) -> pb.TargetServiceGetInfoResponse:
    """Encode the description of a target."""
    return pb.TargetServiceGetInfoResponse(
        model=info.model,
        vocabulary_size=info.vocabulary_size,
        max_context_len=info.max_context_len,
        block_size=info.layout.block_size,
        groups=[
            pb.KvGroup(tables=group.tables, window=group.window or 0, sinks=group.sinks) for group in info.layout.groups
        ],
        kv=encode_occupancy(info.kv),
        eos_token_ids=info.eos_token_ids,
        tensor_parallel=info.tensor_parallel,
        dtype=info.dtype,
        epoch=info.epoch,
        profile=[
            pb.StepSample(rows=sample.rows, tokens=sample.tokens, seconds=sample.seconds) for sample in info.profile
        ],
        lossy=not info.is_lossless,
    )


def decode_target_info(message: pb.TargetServiceGetInfoResponse) -> TargetInfo:
    """Decode the description of a target. Raises `InvalidRequest`."""
    return TargetInfo(
        model=bounds.text("model", message.model, bounds.MAX_NAME_BYTES),
        vocabulary_size=bounds.integer("vocabulary_size", message.vocabulary_size, 1, bounds.MAX_TOKEN_ID),
        max_context_len=bounds.integer("max_context_len", message.max_context_len, 1, bounds.MAX_TOKENS),
        layout=_decode_layout(message),
        kv=decode_occupancy(message.kv),
        eos_token_ids=bounds.tokens("eos_token_ids", message.eos_token_ids, 0, bounds.MAX_EOS_TOKENS),
        tensor_parallel=bounds.integer("tensor_parallel", message.tensor_parallel, 1, bounds.MAX_RANKS),
        dtype=bounds.text("dtype", message.dtype, bounds.MAX_NAME_BYTES),
        epoch=bounds.text("epoch", message.epoch, bounds.MAX_NAME_BYTES),
        profile=_decode_profile(message),
        is_lossless=not message.lossy,
    )


def _decode_profile(message: pb.TargetServiceGetInfoResponse) -> tuple[StepSample, ...]:
    bounds.count("profile", message.profile, 0, bounds.MAX_STEP_SAMPLES)
    samples = []
    for index, sample in enumerate(message.profile):
        field = f"profile[{index}]"
        rows = bounds.integer(f"{field}.rows", sample.rows, 1, bounds.MAX_ROWS)
        tokens = bounds.integer(f"{field}.tokens", sample.tokens, rows, bounds.MAX_TOKENS)
        seconds = bounds.number(f"{field}.seconds", sample.seconds, 0.0, bounds.MAX_SAMPLE_SECONDS, above=True)
        samples.append(StepSample(rows, tokens, seconds))
    return tuple(samples)


def _decode_layout(message: pb.TargetServiceGetInfoResponse) -> KvLayout:
    bounds.count("groups", message.groups, 1, bounds.MAX_KV_GROUPS)
    return KvLayout(
        block_size=bounds.integer("block_size", message.block_size, 1, bounds.MAX_TOKENS),
        groups=tuple(_decode_group(group, f"groups[{index}]") for index, group in enumerate(message.groups)),
    )


def _decode_group(message: pb.KvGroup, field: str) -> KvGroup:
    window = bounds.integer(f"{field}.window", message.window, 0, bounds.MAX_TOKENS)
    return KvGroup(
        tables=bounds.integer(f"{field}.tables", message.tables, 1, bounds.MAX_KV_TABLES),
        window=window or None,
        sinks=bounds.integer(f"{field}.sinks", message.sinks, 0, bounds.MAX_TOKENS if window else 0),
    )
