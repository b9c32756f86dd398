"""Bounds of everything that crosses a socket, and the checks that name field, value and bound."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized

from cluster.core.errors import InvalidRequest

MAX_ROWS = 4096
MAX_TOKENS = 1 << 20
MAX_TREE_NODES = 256
MAX_TREE_DEPTH = 64
MAX_SEQUENCE_ID_BYTES = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 256
MAX_FAULT_BYTES = 1024
MAX_NAME_BYTES = 256
MAX_SALT_BYTES = 256
MAX_KV_GROUPS = 256
MAX_KV_TABLES = 4096
MAX_STEP_SAMPLES = 1024
MAX_STEP_SECONDS = 3600.0
MAX_CLIENT_BYTES = 64
MAX_TOKEN_ID = (1 << 31) - 1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


def count(field: str, values: Sized, least: int, most: int) -> None:
    """Refuse a list that is too short or too long, before anything is built from it."""
    if not least <= len(values) <= most:
        raise InvalidRequest(field, f"{len(values)} entries", f"between {least} and {most} entries")


def whole(field: str, value: int, least: int, most: int) -> int:
    """Refuse an integer outside `least … most`."""
    if not least <= value <= most:
        raise InvalidRequest(field, value, f"between {least} and {most}")
    return value


def real(field: str, value: float, least: float, most: float, *, above: bool = False) -> float:
    """Refuse a float that is not finite or outside `least … most` (`above`: `least` itself too)."""
    low = value > least if above else value >= least
    if not (math.isfinite(value) and low and value <= most):
        words = f"above {least:g} and at most {most:g}" if above else f"between {least:g} and {most:g}"
        raise InvalidRequest(field, value, words)
    return value


def identifier(field: str, value: str) -> str:
    """Refuse a sequence id that is empty or too long."""
    if not 1 <= len(value.encode()) <= MAX_SEQUENCE_ID_BYTES:
        raise InvalidRequest(field, value, f"between 1 and {MAX_SEQUENCE_ID_BYTES} bytes")
    return value


def text(field: str, value: str, most: int) -> str:
    """Refuse a string of more than `most` bytes."""
    if len(value.encode()) > most:
        raise InvalidRequest(field, value, f"at most {most} bytes")
    return value


def tokens(field: str, values: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    """Refuse a token list that is too short, too long, or holds what no vocabulary has."""
    count(field, values, least, most)
    if values and max(values) > MAX_TOKEN_ID:
        index = next(index for index, value in enumerate(values) if value > MAX_TOKEN_ID)
        raise InvalidRequest(f"{field}[{index}]", values[index], f"between 0 and {MAX_TOKEN_ID}")
    return tuple(values)
