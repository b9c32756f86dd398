"""The options that all commands share."""

from __future__ import annotations

from typing import Annotated

import typer

ConfigOption = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="A YAML file or a preset: cpu (the default) or gpu."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting. May be repeated."),
]
