"""The options that all commands share, and how a shell completes their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from cluster.core.config.load import kind_of, known_keys
from deploy.settings import presets
from workers.serve.configuration import PLUGINS


def complete_config(incomplete: str) -> Iterator[str]:
    """Yield the presets that begin so. The shell itself completes files."""
    yield from (name for name in presets() if name.startswith(incomplete))


def complete_setting(context: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield the keys of settings that begin so, with the sign that follows; behind the sign, the values of the setting.

    The context's object may be a key: the shell then asks for its value alone.
    """
    name, sign, _ = incomplete.partition("=")
    if context.obj:
        yield from (value for value in known_values(context.obj) if value.startswith(incomplete))
    elif sign:
        yield from (f"{name}={value}" for value in known_values(name) if f"{name}={value}".startswith(incomplete))
    else:
        yield from (f"{key}=" for key in dict.fromkeys((*known_keys(), *_SELECTING)) if key.startswith(incomplete))


def known_values(key: str) -> tuple[str, ...]:
    """The values of a setting that has few: a choice, a switch, or the names of plug-ins."""
    for registry in PLUGINS:
        if key == registry.selector:
            return registry.names()
    return tuple(map(str, _choices(kind_of(key))))


def _choices(kind: Any) -> Iterator[str]:
    """The values of the literals and switches in an annotation, in their order."""
    if get_origin(kind) is Literal or kind is bool:
        yield from ("true", "false") if kind is bool else get_args(kind)
        return
    for part in get_args(kind):
        yield from _choices(part)


_SELECTING = tuple(registry.selector for registry in PLUGINS)
"""Keys whose values are names of plug-ins."""


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
        help="Override one setting; the value is YAML. May be repeated.",
        autocompletion=complete_setting,
    ),
]
