"""The interface of drafting methods, and the registry of all methods.

A method is one file of this package: a settings class and a factory decorated with `@register(name, settings)`.
`draft.method` selects it, and its settings are the section `draft.<name>`. Files of this package import torch only
inside their factories, so that reading the settings stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from cluster.core.config.base import PluginSettings
from cluster.core.config.registry import Registry
from cluster.core.config.sections import DraftSection, TargetSection
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId


class DraftMethod(Protocol):
    """Proposes drafts. It is synchronous and always called from one thread."""

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """Commit each row's new tokens and draft a tree after them. Returns one proposal per row, in order.

        The rows are of distinct sequences. A row that cannot be served gets a fault and does not affect the others.
        Repeating a row repeats its proposal.
        """
        ...

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free everything that is stored for the sequences. Unknown sequences are no error."""
        ...


@runtime_checkable
class IdleWork(Protocol):
    """Optional work of a `DraftMethod` between calls. Each piece is short, so that the next call hardly waits."""

    def catch_up(self, sequence_ids: Sequence[SequenceId]) -> bool:
        """Compute some committed tokens of these sequences that `propose` has not computed yet.

        Returns false when nothing is left or there is no room. Unknown sequences are no error.
        """
        ...

    def run_ahead(self) -> bool:
        """Do one piece of work that makes the next proposals ready sooner.

        Returns false when there is none left before the next `propose`.
        """
        ...


Factory = Callable[[Any, DraftSection, TargetSection], DraftMethod]
"""Makes a method from its own settings, the common settings of drafting, and the target's settings."""


@dataclass(frozen=True, slots=True)
class MethodPlugin:
    """A registered drafting method."""

    settings: type[PluginSettings]
    """Class of the section `draft.<name>`. One that derives from `DraftModelSection` loads a model."""
    create: Factory
    target_settings: Callable[[Any], Mapping[str, Any]] | None = None
    """Computes the settings of `target`, by dotted key, that the method needs; only a lossy method needs any."""


METHODS: Registry[MethodPlugin] = Registry("draft.method", "workers.draft")

SettingsType = TypeVar("SettingsType", bound=PluginSettings)
MethodType = TypeVar("MethodType", bound=DraftMethod)


def register(
    name: str,
    settings: type[SettingsType],
    target_settings: Callable[[SettingsType], Mapping[str, Any]] | None = None,
) -> Callable[
    [Callable[[SettingsType, DraftSection, TargetSection], MethodType]],
    Callable[[SettingsType, DraftSection, TargetSection], MethodType],
]:
    """Make the decorated factory known as `name`. Raises `ValueError` when the name is taken."""

    def add(
        create: Callable[[SettingsType, DraftSection, TargetSection], MethodType],
    ) -> Callable[[SettingsType, DraftSection, TargetSection], MethodType]:
        METHODS.register(name, MethodPlugin(settings, create, target_settings))
        return create

    return add


def create(draft: DraftSection, target: TargetSection) -> DraftMethod:
    """Create the method that `draft.method` selects. This is slow where it loads weights.

    Raises `ConfigurationError` for an unknown name, and the errors of the factory.
    """
    plugin = METHODS.get(draft.method)
    return plugin.create(draft.settings(draft.method, plugin.settings), draft, target)
