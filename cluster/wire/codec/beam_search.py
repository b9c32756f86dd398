"""Conversion between protobuf and types, for the parameters of a beam search."""

from __future__ import annotations

from cluster.core import bounds
from cluster.core.errors import InvalidRequest
from cluster.core.request import BeamScoring, EarlyStopping
from pilotfish.v1 import generation_pb2

_DECODED = {
    generation_pb2.EARLY_STOPPING_NO: EarlyStopping.NO,
    generation_pb2.EARLY_STOPPING_YES: EarlyStopping.YES,
    generation_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
_ENCODED = {decoded: encoded for encoded, decoded in _DECODED.items()}


def encode_beam_search(scoring: BeamScoring) -> generation_pb2.BeamSearch:
    """Encode how a beam search scores and ends."""
    return generation_pb2.BeamSearch(
        length_penalty=scoring.length_penalty, early_stopping=_ENCODED[scoring.early_stopping]
    )


def decode_beam_search(message: generation_pb2.BeamSearch, default: BeamScoring) -> BeamScoring:
    """Decode how a beam search scores and ends; unset fields are those of `default`. Raises `InvalidRequest`."""
    penalty = message.length_penalty if message.HasField("length_penalty") else default.length_penalty
    ending = message.early_stopping
    if ending != generation_pb2.EARLY_STOPPING_UNSPECIFIED and ending not in _DECODED:
        raise InvalidRequest("early_stopping", ending, "true, false or never")
    return BeamScoring(
        bounds.number("length_penalty", penalty, -bounds.MAX_LENGTH_PENALTY, bounds.MAX_LENGTH_PENALTY),
        _DECODED.get(ending, default.early_stopping),
    )
