"""The options that all commands share, and how a shell completes their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from cluster.core.config.load import known_keys
from deploy.settings import presets


def complete_config(incomplete: str) -> Iterator[str]:
    """Yield the presets that begin so. The shell itself completes files."""
    yield from (name for name in presets() if name.startswith(incomplete))


def complete_setting(incomplete: str) -> Iterator[str]:
    """Yield the keys of settings that begin so, with the sign that follows."""
    yield from (f"{key}=" for key in known_keys() if key.startswith(incomplete))


ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A YAML file or a preset: cpu (the default) or gpu.",
        autocompletion=complete_config,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one setting. May be repeated.",
        autocompletion=complete_setting,
    ),
]
