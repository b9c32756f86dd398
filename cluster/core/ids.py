"""Distinct identifiers are distinct types, so that one can never be passed for another."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""Names one client request; chosen by the client or drawn by the ingress."""

SequenceId = NewType("SequenceId", str)
"""Names one token sequence on every worker that holds state for it."""

TokenId = int
"""An index into the model's vocabulary, `0 <= id < vocabulary_size`."""

BlockId = NewType("BlockId", int)
"""An index into the paged KV pool, in blocks."""
