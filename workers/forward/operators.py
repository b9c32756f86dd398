"""Custom torch operators. The compiler sees their output shapes and does not trace into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

NAMESPACE = "pilotfish"

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


Result = TypeVar("Result", torch.Tensor, list[torch.Tensor])


def define(schema: str, function: Callable[..., Result], shape: Callable[..., Result]) -> None:
    """Register `function` as `torch.ops.pilotfish.<name>`; `shape` replaces it while the compiler traces."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    _library.impl(name, shape, "Meta")
