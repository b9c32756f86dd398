"""Bounds of single values, in the words that every refusal has."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.core.errors import InvalidRequest
from cluster.core.verification import TargetInfo


def integer(field: str, value: int, low: int, high: int) -> int:
    """`value`, when it lies in `low … high`; raises `InvalidRequest` otherwise."""
    if not low <= value <= high:
        raise InvalidRequest(field, value, f"an integer from {low} to {high}")
    return value


def number(field: str, value: float, low: float, high: float, *, above: bool = False) -> float:
    """`value`, when finite and in `low … high` (`above`: but not `low` itself); raises `InvalidRequest` otherwise."""
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        raise InvalidRequest(field, value, f"a number {'above' if above else 'from'} {low:g} to {high:g}")
    return value


def tokens(field: str, values: Sequence[int], info: TargetInfo) -> tuple[int, ...]:
    """Token ids, each below the vocabulary's size; raises `InvalidRequest` naming the first that is not."""
    for position, token in enumerate(values):
        if not 0 <= token < info.vocabulary_size:
            raise bad_token(f"{field}[{position}]", token, info.vocabulary_size)
    return tuple(values)


def bad_token(field: str, token: int, vocabulary_size: int) -> InvalidRequest:
    """The error for an id outside the vocabulary."""
    return InvalidRequest(field, token, f"a token id from 0 to {vocabulary_size - 1}")


def text(field: str, value: str, most: int) -> str:
    """`value`, when UTF-8 holds it in `most` bytes; raises `InvalidRequest` otherwise."""
    if len(value.encode()) > most:
        raise InvalidRequest(field, value, f"at most {most} bytes")
    return value
