"""Checks that a value out of bounds is refused as clients need it: with its field, its value and the bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cluster.core.errors import InvalidRequest


def assert_refused(decode: Callable[[Any], object], message: object, field: str, bound: str) -> None:
    """Assert that `decode` raises `InvalidRequest` for `message`, and that the error names `field` and `bound`."""
    with pytest.raises(InvalidRequest) as refused:
        decode(message)
    assert refused.value.field == field
    assert refused.value.bound == bound
    assert str(refused.value).startswith(f"{field}: ")
