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


CacheSalt = NewType("CacheSalt", str)
"""Names who shares what is stored of requests: stored blocks, texts and tables serve requests with an equal one only.
`scoped_salt` makes it."""
NO_SALT = CacheSalt("")
"""That of sequences which no client has sent."""


def scoped_salt(client: str, salt: str, *, shares_between_keys: bool) -> CacheSalt:
    """Return the salt by which the cluster stores what it keeps of a request.

    `client` is the name of an API key, which contains no slash, or empty where no keys are demanded; `salt` is the
    request's own `cache_salt`. Different pairs have different results, unless requests share between keys: then the
    client does not count.
    """
    return CacheSalt(f"{'' if shares_between_keys else client}/{salt}")


def scoped_request_id(client: str, request_id: str) -> RequestId:
    """Return the request's id inside the cluster: ids of different clients never collide.

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
