"""Identifier types. They are distinct so that one cannot be passed for another."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""The id of a client's request, chosen by the client or by the ingress."""

SequenceId = NewType("SequenceId", str)
"""The id of a token sequence, the same on every worker that holds state for it."""

BlockId = NewType("BlockId", int)
"""The index of a block in the paged KV pool."""
