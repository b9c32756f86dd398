"""Declares the options of a command once, as the annotated fields of a dataclass."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from cluster.core.errors import ConfigurationError

_CONTEXT = "context"
"""The name of the parameter with what typer knows of the command line."""
Base = Callable[[Mapping[str, Any], Collection[str]], Mapping[str, Any]]
"""Gives values of options that the command line does not give. It gets all values by name, and the names given."""


def command_with_options(
    options: type[Any], base: Base | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function whose first parameter is an instance of the dataclass `options` into a typer command.

    Every field of the dataclass becomes an option of the command, with the field's type, default and annotation: a
    `typer.Option`, or a help text alone. The function's other parameters stay options of their own. A field of type
    `tuple[T, ...]` may be repeated on the command line, unless its annotation has a parser (see `number_list`). A tuple
    of numbers that is annotated with a help text has one. `base` has values in the place of defaults.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(function, eval_str=True).parameters.values()
        declared = {parameter.name: parameter for parameter in _parameters(options)}
        own = {parameter.name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others}

        def command(**values: Any) -> None:
            chosen = {name: values.pop(name) for name in declared}
            for name, value in chosen.items():
                chosen[name] = tuple(value) if isinstance(value, list) else value
            if base is not None:
                context: typer.Context = values.pop(_CONTEXT)
                given = {name for name in declared if _is_given(context, name)}
                chosen |= {name: value for name, value in base(chosen, given).items() if name not in given}
            function(options(**chosen), **values)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        parameters = [*declared.values(), *own.values()]
        if base is not None:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(_CONTEXT, kind, annotation=typer.Context))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line, or a variable of the environment, gives an option."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def number_list(option: str, kind: type[int] | type[float]) -> Callable[[Any], tuple[Any, ...]]:
    """A typer parser of numbers with commas between them, for `option`. Raises `ConfigurationError`."""

    def parse(value: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):  # the default
            return value
        try:
            return tuple(kind(part) for part in value.split(",") if part.strip())
        except ValueError:
            raise ConfigurationError(f"{option}: {value!r} is refused; it must be numbers with commas") from None

    return parse


def flag(name: str) -> str:
    """An option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def refuse(options: Any, name: str, bound: str) -> None:
    """Raise `ConfigurationError` for an option out of bounds."""
    raise ConfigurationError(f"{flag(name)}: {getattr(options, name)} is refused; {bound}")


def check_at_least(options: Any, bounds: Mapping[str, float]) -> None:
    """Raise `ConfigurationError` unless each option that `bounds` names is at least its bound."""
    for name, bound in bounds.items():
        if not getattr(options, name) >= bound:
            refuse(options, name, f"it must be at least {bound}")


def check_directory(options: Any, name: str) -> None:
    """Raise `ConfigurationError` unless an option names a directory that is there or can be made, or is unset."""
    directory: Path | None = getattr(options, name)
    if directory is None:
        return
    try:
        existing = next(one for one in (directory, *directory.absolute().parents) if one.exists())
        is_usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except OSError:  # a name that is too long, or a directory that this user may not search
        existing, is_usable = directory, False
    if not is_usable:
        refuse(options, name, f"it must be a directory, in one that this user may write, and {existing} is not")


def _parameters(options: type[Any]) -> list[inspect.Parameter]:
    """One keyword-only parameter per field, as typer reads it."""
    hints = get_type_hints(options, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for field in fields(options):
        kind, *metadata = (
            get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else (hints[field.name],)
        )
        metadata = [_option(field.name, kind, entry) if isinstance(entry, str) else entry for entry in metadata]
        has_parser = any(isinstance(entry, OptionInfo) and entry.parser for entry in metadata)
        if get_origin(kind) is tuple:
            kind = str if has_parser else GenericAlias(list, get_args(kind)[:1])
        annotation = Annotated[(kind, *metadata)] if metadata else kind
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return parameters


def _option(name: str, kind: Any, text: str) -> OptionInfo:
    """The option of a field that is annotated with a help text alone."""
    number = next((each for each in get_args(kind)[:1] if each in (int, float)), None)
    parser = None
    if get_origin(kind) is tuple and number is not None:
        parser = number_list(flag(name), number)
    option: OptionInfo = typer.Option(parser=parser, metavar="NUMBERS" if parser else None, help=text)
    return option
