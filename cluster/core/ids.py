"""Identifier types. They are distinct so that one cannot be passed for another."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""The id of a client's request, chosen by the client or by the ingress."""

SequenceId = NewType("SequenceId", str)
"""The id of a token sequence, the same on every worker that holds state for it."""

BlockId = NewType("BlockId", int)
"""The index of a block in the paged KV pool."""


def scoped_request_id(client: str, request_id: str) -> RequestId:
    """Return the id by which the cluster knows a request: ids of different clients never meet.

    `client` is the name of an API key, which contains no slash, or empty where no keys are demanded.
    """
    return RequestId(f"{client}/{request_id}" if client else request_id)
