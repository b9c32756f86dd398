"""Which configurations of a test `make test` runs. `make test-all` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def slow_but(fast: Iterable[Any], values: Iterable[Any]) -> list[ParameterSet]:
    """Parameters of a test, of which `make test` takes the fast ones: the others repeat what these show."""
    kept = list(fast)
    return [pytest.param(value, marks=() if value in kept else pytest.mark.slow) for value in values]
