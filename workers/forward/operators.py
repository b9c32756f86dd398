"""Custom torch operators. The compiler sees their output shapes and does not trace into them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import torch

NAMESPACE = "pilotfish"

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_handles = count()


Entry = TypeVar("Entry")
Result = TypeVar("Result", torch.Tensor, list[torch.Tensor])


class Entries(dict[int, Entry]):
    """What an operator finds by a handle in a tensor, so that one compiled layer serves all layers of a model."""

    def enter(self, owner: object, entry: Entry) -> torch.Tensor:
        """Register an entry for the lifetime of `owner`. Returns its handle."""
        handle = next(_handles)
        self[handle] = entry
        weakref.finalize(owner, self.pop, handle, None)
        return torch.tensor(handle)


def define(schema: str, function: Callable[..., Result], shape: Callable[..., Result]) -> None:
    """Register `function` as `torch.ops.pilotfish.<name>`; `shape` replaces it while the compiler traces."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    _library.impl(name, shape, "Meta")
