"""One registry for every kind of plug-in: drafting methods and acceptance rules.

A plug-in is one file that registers itself and declares its settings section. No other file names it. The registry
imports all files of one package on first use, so these files import heavy libraries only where they need them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from cluster.core.config.base import PluginSettings
from cluster.core.errors import ConfigurationError, shorten
from cluster.core.nearest import nearest


class Plugin(Protocol):
    """What every plug-in declares."""

    @property
    def settings(self) -> type[PluginSettings]:
        """The class of the plug-in's settings section."""


PluginType = TypeVar("PluginType", bound=Plugin, covariant=True)


class Registry(Generic[PluginType]):
    """Plug-ins of one kind by name. `selector` is the dotted key that selects one: `draft.method`.

    `package` is the package whose files register the plug-ins, or a single module that registers all of them.
    """

    def __init__(self, selector: str, package: str) -> None:
        self.selector = selector
        self.section, self.key = selector.split(".")
        self._package = package
        self._plugins: dict[str, PluginType] = {}
        self._is_discovered = False

    def register(self, name: str, plugin: PluginType) -> None:  # type: ignore[misc]  # only called while importing
        """Register `plugin` under `name`. Raises `ValueError` when the name is taken."""
        if name in self._plugins:
            raise ValueError(f"{self.selector}: {name!r} is registered twice")
        self._plugins[name] = plugin

    def names(self) -> tuple[str, ...]:
        """Names of all plug-ins, sorted."""
        return tuple(sorted(self._discovered()))

    def items(self) -> Iterator[tuple[str, PluginType]]:
        """Names and plug-ins, sorted by name."""
        return iter(sorted(self._discovered().items()))

    def get(self, name: str) -> PluginType:
        """The plug-in with that name. Raises `ConfigurationError`, which lists the names and a similar one."""
        plugins = self._discovered()
        if name not in plugins:
            found = nearest(name, plugins)
            raise ConfigurationError(
                f"{self.selector}: {shorten(name)} is unknown; it must be one of {', '.join(sorted(plugins))}"
                + ("" if found is None else f" (the nearest is {found})")
            )
        return plugins[name]

    def _discovered(self) -> Mapping[str, PluginType]:
        if not self._is_discovered:
            module = importlib.import_module(self._package)
            for file in pkgutil.iter_modules(getattr(module, "__path__", ())):
                importlib.import_module(f"{self._package}.{file.name}")
            self._is_discovered = True
        return self._plugins
