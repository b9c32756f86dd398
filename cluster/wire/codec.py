"""Proto ↔ types for every internal message; nothing unchecked gets past here."""

from __future__ import annotations

from cluster.wire.codec_common import (
    decode_logprobs,
    decode_sampling,
    decode_sequence_ids,
    encode_logprobs,
    encode_sampling,
)
from cluster.wire.codec_draft import (
    decode_client,
    decode_draft_rows,
    decode_proposals,
    encode_draft_rows,
    encode_proposals,
)
from cluster.wire.codec_target import (
    decode_occupancy,
    decode_open_result,
    decode_open_rows,
    decode_step_batch,
    decode_step_result,
    decode_target_info,
    encode_occupancy,
    encode_open_result,
    encode_open_rows,
    encode_step_batch,
    encode_step_result,
    encode_target_info,
    open_rows_from_bytes,
    open_rows_to_bytes,
    step_batch_from_bytes,
    step_batch_to_bytes,
)

__all__ = [
    "decode_client",
    "decode_draft_rows",
    "decode_logprobs",
    "decode_occupancy",
    "decode_open_result",
    "decode_open_rows",
    "decode_proposals",
    "decode_sampling",
    "decode_sequence_ids",
    "decode_step_batch",
    "decode_step_result",
    "decode_target_info",
    "encode_draft_rows",
    "encode_logprobs",
    "encode_occupancy",
    "encode_open_result",
    "encode_open_rows",
    "encode_proposals",
    "encode_sampling",
    "encode_step_batch",
    "encode_step_result",
    "encode_target_info",
    "open_rows_from_bytes",
    "open_rows_to_bytes",
    "step_batch_from_bytes",
    "step_batch_to_bytes",
]
