"""Settings of the target that follow from the drafting method, and the notice for targets that are not lossless."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, shorten
from workers.draft.registry import METHODS
from workers.serve.configuration import load_configuration

NOT_LOSSLESS = (
    "NOT LOSSLESS: answers differ from what the model alone writes, because of target.acceptance or target.kv.window"
)
"""The notice that is printed when a target reports that it is not lossless (`TargetInfo.is_lossless`)."""


def with_acceptance(configuration: Configuration) -> Configuration:
    """The configuration with the settings of `target` that the drafting method implies.

    Raises `ConfigurationError` if such a setting is chosen without its drafting method.
    """
    values = configuration.model_dump(mode="json")
    defaults = load_configuration({}).model_dump(mode="json")
    for name, plugin in METHODS.items():
        if plugin.target_settings is None:
            continue
        settings = configuration.draft.settings(name, plugin.settings)
        implied = {f"target.{key}": value for key, value in plugin.target_settings(settings).items()}
        if name == configuration.draft.method:
            return load_configuration(values, implied)
        for key in implied:
            if _at(values, key) != _at(defaults, key):
                raise ConfigurationError(f"{key}: {shorten(_at(values, key))} is refused; draft.method={name} sets it")
    return configuration


def _at(values: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key."""
    return reduce(lambda section, name: section[name], key.split("."), values)
