"""What every drafting method is, and the registry of them.

A new method is one file in this package with one `@register(name)` on its factory; nothing else
names it. `create` imports the package's files, so that they register themselves.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import workers.draft
from cluster.core.config import DraftSection, TargetSection
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.errors import ConfigurationError, shorten
from cluster.core.ids import SequenceId


class DraftMethod(Protocol):
    """Guesses; synchronous, and always called from one thread."""

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """Commit each row's new tokens, then grow a tree after them: one proposal per row, in order.

        `rows` are of distinct sequences. A row that cannot be served gets a fault; the others do not
        notice. Repeating a row repeats its proposal.
        """
        ...

    def learn(self, sequence_ids: Sequence[SequenceId]) -> bool:
        """Let a piece of what these sequences were told go through, where `propose` has not done so.

        False when nothing is left, or cannot be done now. Unknown ones are no error.
        """
        ...

    def grow(self) -> bool:
        """Do one short piece of work that nobody waits for, so that the next proposals are ready sooner.

        False when there is none: nothing is to be asked again before the next `propose`.
        """
        ...

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Forget the sequences; unknown ones are no error."""
        ...

    def close(self) -> None:
        """Free everything. Nothing is called afterwards."""
        ...


Factory = Callable[[DraftSection, TargetSection], DraftMethod]
FactoryType = TypeVar("FactoryType", bound=Factory)

_factories: dict[str, Factory] = {}


def register(name: str) -> Callable[[FactoryType], FactoryType]:
    """Make a factory known under `name`. Raises `ValueError` when the name is taken."""

    def add(factory: FactoryType) -> FactoryType:
        if name in _factories:
            raise ValueError(f"drafting method {name!r} is registered twice")
        _factories[name] = factory
        return factory

    return add


def names() -> tuple[str, ...]:
    """The registered methods, sorted."""
    for file in _files():
        importlib.import_module(f"workers.draft.{file}")
    return tuple(sorted(_factories))


def _files() -> tuple[str, ...]:
    return tuple(module.name for module in pkgutil.iter_modules(workers.draft.__path__))


def create(name: str, section: DraftSection, target_section: TargetSection) -> DraftMethod:
    """Make the method; slow where it loads weights.

    Raises `ConfigurationError` for an unknown name, and whatever the factory raises.
    """
    if name in _files():
        # A method lives in the file of its name: one that only looks up need not load what the others compute with.
        importlib.import_module(f"workers.draft.{name}")
    if name not in _factories:
        known = names()
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigurationError(
                f"draft.method: {shorten(name)} is unknown; it must be one of {', '.join(known)} "
                f"(the nearest is {nearest})"
            )
    return _factories[name](section, target_section)
