"""The configuration with the sections of all plug-ins that the workers have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.core.config.load import load
from cluster.core.config.registry import Plugin, Registry
from cluster.core.config.sections import Configuration
from workers.draft.registry import METHODS
from workers.sampling.acceptance import RULES

PLUGINS: tuple[Registry[Plugin], ...] = (METHODS, RULES)
"""The registries of all kinds of plug-ins."""


def load_configuration(values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Configuration:
    """Build the configuration from nested values and dotted overrides (`{"target.dtype": "bfloat16"}`).

    Plug-ins have their sections, and are checked when selected. Raises `ConfigurationError`.
    """
    return load(values, overrides, PLUGINS)
