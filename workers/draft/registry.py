"""What a drafting method is, and the registry of all methods.

A method is one file of this package: a settings class and a factory decorated with `@register(name, settings)`.
`draft.method` selects it, and its settings are the section `draft.<name>`. Files of this package import torch only
inside their factories: whoever reads the settings alone need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from cluster.core.config import DraftSection, TargetSection
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.registry import Registry
from cluster.core.section import PluginSettings


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

    Raises `ConfigurationError` for an unknown name, and whatever the factory raises.
    """
    plugin = METHODS.get(draft.method)
    return plugin.create(draft.settings(draft.method, plugin.settings), draft, target)
