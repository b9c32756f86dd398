"""Identifier types. They are distinct so that one cannot be passed for another."""

from __future__ import annotations

import re
from typing import NewType

from cluster.core.errors import InvalidRequest

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")

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


def is_request_id(text: str) -> bool:
    """Whether `text` is a valid request id."""
    return _REQUEST_ID.fullmatch(text) is not None


def check_request_id(text: str) -> RequestId:
    """Return a valid request id. Raises `InvalidRequest` (`request_id`)."""
    if not is_request_id(text):
        raise InvalidRequest("request_id", text, "1 to 64 letters, digits or ._:-")
    return RequestId(text)
