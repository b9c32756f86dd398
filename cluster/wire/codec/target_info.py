"""Conversion between protobuf and types, for the description of a target and the occupancy of its KV pool."""

from __future__ import annotations

from cluster.core import bounds
from cluster.core.kv import KvGroup, KvLayout, KvOccupancy
from cluster.core.request import USUAL_SCORING
from cluster.core.verification import StepSample, TargetInfo
from cluster.wire.codec.common import decode_beam_search, decode_words, encode_beam_search
from pilotfish.v1 import common_pb2
from pilotfish.v1 import target_pb2 as pb


def encode_occupancy(kv: KvOccupancy) -> pb.KvOccupancy:
    """Encode the occupancy of the KV pool."""
    return pb.KvOccupancy(blocks_total=kv.blocks_total, blocks_free=kv.blocks_free)


def decode_occupancy(message: pb.KvOccupancy) -> KvOccupancy:
    """Decode the occupancy of the KV pool. Raises `InvalidRequest`."""
    free = bounds.integer("kv.blocks_free", message.blocks_free, 0, message.blocks_total)
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
        decoder_start=info.decoder_start,
        max_source_len=info.max_source_len,
        forced_eos_token_id=info.forced_eos_token_id,
        bad_words=[common_pb2.TokenIds(ids=word) for word in info.bad_words],
        no_repeat_ngram_size=info.no_repeat_ngram_size,
        min_tokens=info.min_tokens,
        beam_search=encode_beam_search(info.beam_scoring),
        fingerprint=info.fingerprint,
        dequantized_from=info.dequantized_from,
    )


def decode_target_info(message: pb.TargetServiceGetInfoResponse) -> TargetInfo:
    """Decode the description of a target. Raises `InvalidRequest`."""
    vocabulary_size = bounds.integer("vocabulary_size", message.vocabulary_size, 1, bounds.MAX_TOKEN_ID)
    forced_eos = message.forced_eos_token_id if message.HasField("forced_eos_token_id") else None
    return TargetInfo(
        model=bounds.text("model", message.model, bounds.MAX_NAME_BYTES),
        vocabulary_size=vocabulary_size,
        max_context_len=bounds.integer("max_context_len", message.max_context_len, 1, bounds.MAX_TOKENS),
        layout=_decode_layout(message),
        kv=decode_occupancy(message.kv),
        eos_token_ids=bounds.tokens("eos_token_ids", message.eos_token_ids, 0, bounds.MAX_EOS_TOKENS),
        tensor_parallel=bounds.integer("tensor_parallel", message.tensor_parallel, 1, bounds.MAX_RANKS),
        dtype=bounds.text("dtype", message.dtype, bounds.MAX_NAME_BYTES),
        epoch=bounds.text("epoch", message.epoch, bounds.MAX_NAME_BYTES),
        profile=_decode_profile(message),
        is_lossless=not message.lossy,
        decoder_start=bounds.tokens(
            "decoder_start", message.decoder_start, 0, bounds.MAX_DECODER_START, vocabulary_size
        ),
        max_source_len=bounds.integer("max_source_len", message.max_source_len, 0, bounds.MAX_SOURCE_TOKENS),
        forced_eos_token_id=None
        if forced_eos is None
        else bounds.integer("forced_eos_token_id", forced_eos, 0, vocabulary_size - 1),
        bad_words=decode_words(message.bad_words, "bad_words", vocabulary_size),
        no_repeat_ngram_size=bounds.integer(
            "no_repeat_ngram_size", message.no_repeat_ngram_size, 0, bounds.MAX_NO_REPEAT_NGRAM
        ),
        min_tokens=bounds.integer("min_tokens", message.min_tokens, 0, bounds.MAX_TOKENS),
        beam_scoring=decode_beam_search(message.beam_search, USUAL_SCORING),
        fingerprint=bounds.text("fingerprint", message.fingerprint, bounds.MAX_NAME_BYTES),
        dequantized_from=bounds.text("dequantized_from", message.dequantized_from, bounds.MAX_NAME_BYTES),
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
