"""What a request gets at the first server that reads it: a seed where its client gives none, and the caller's span."""

from __future__ import annotations

import secrets
from typing import Any

TRACEPARENT = "traceparent"
"""The HTTP header, and the key of gRPC's metadata, that names the caller's span in W3C's form."""
_MOST_TRACEPARENT_CHARS = 64
_SEED_BITS = 53
"""A JSON number holds this many bits exactly in every language, so a reported seed can be sent again."""


def draw_seed() -> int:
    """Return a random seed for a request that has none."""
    return secrets.randbits(_SEED_BITS)


def traceparent_of(metadata: Any) -> str:
    """Return the caller's span from the metadata of a gRPC call; one that cannot be right counts as none."""
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str) and len(value) <= _MOST_TRACEPARENT_CHARS:
            return value
    return ""
