"""Recipes of `pilotfish distill`: YAML files with values of the options that say what is trained, and how."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import lru_cache
from importlib import resources
from os.path import expanduser
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from cluster.core.config.base import with_home
from cluster.core.config.load import named, refusal
from cluster.core.errors import ConfigurationError
from cluster.core.nearest import nearest
from deploy.settings import parse_values
from workers.distill.options import Recipe

_FOLDER, _ENDING = "recipes", ".yaml"
_JOINT = ("medusa-joint", "medusa-2")
_ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "steps": ("minutes",),
    "minutes": ("steps",),
    "start": ("layers", "student_config"),
    "layers": ("start", "search"),
    "search": ("layers",),
    "student_config": ("start",),
}
"""What an option of the command line replaces in a recipe, beside its own value."""
_PATHS = ("prompts", "evaluate", "student_config", "start")
"""What a recipe names relative to its own directory, or to a home directory with a first `~`."""


def recipes() -> tuple[str, ...]:
    """The names of the packaged recipes."""
    found = (entry.name for entry in _folder().iterdir() if entry.name.endswith(_ENDING))
    return tuple(sorted(name.removesuffix(_ENDING) for name in found))


def summary(name: str) -> str:
    """What a packaged recipe says of itself: the comment that it begins with."""
    text = _folder().joinpath(f"{name}{_ENDING}").read_text("utf-8")
    lines = re.match(r"(?:#.*\n)+", text)
    return " ".join(line.lstrip("# ") for line in lines[0].splitlines()) if lines else ""


def recipe_values(options: Mapping[str, Any], given: Collection[str]) -> Mapping[str, Any]:
    """The values of the recipe that `options` name, by option; none without one. It is the `base` of the command.

    Options that are `given` replace the recipe's alternatives to them, too. Raises `ConfigurationError`.
    """
    if (name := options["recipe"]) is None:
        return {}
    replaced = {other for option in given for other in _ALTERNATIVES.get(option, ())}
    return {option: value for option, value in read_recipe(name).items() if option not in replaced}


def read_recipe(name: str) -> Mapping[str, Any]:
    """The checked values of a packaged recipe or a YAML file, by option; what it leaves out is left out.

    Raises `ConfigurationError`, which names the file, the option, its value and the bound.
    """
    source, text, directory = _read(name)
    values = parse_values(source, text)
    _refuse_booleans(source, values)
    try:
        recipe = _adapter().validate_python(values)
    except ValidationError as error:
        raise ConfigurationError("; ".join(f"{source}: {problem}" for problem in _problems(error))) from None
    except ConfigurationError as error:  # it names options of the command line
        words = re.sub(r"--([a-z][a-z0-9-]*)", lambda found: found[1].replace("-", "_"), str(error))
        raise ConfigurationError(f"{source}: {words}") from None
    try:
        return {option: _relative(option, getattr(recipe, option), directory) for option in values}
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from None


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


def _folder() -> Any:
    return resources.files("deploy.distillation").joinpath(_FOLDER)


def _read(name: str) -> tuple[str, str, Path]:
    """What errors call a recipe, its text, and the directory of its relative paths. Raises `ConfigurationError`."""
    if name in recipes():
        return f"recipe {name}", _folder().joinpath(f"{name}{_ENDING}").read_text("utf-8"), Path()
    if name in _JOINT:
        raise ConfigurationError(
            f"--recipe {name}: refused; it trains the target as well (Medusa-2), and a target with other weights "
            "writes other texts; it must be medusa, whose heads learn from the target as it is"
        )
    file = Path(expanduser(name))
    try:
        return name, file.read_text("utf-8"), file.parent
    except (OSError, ValueError) as error:  # a path with a null byte, or bytes that are no UTF-8
        known = ", ".join(recipes())
        raise ConfigurationError(f"--recipe {name}: needed a readable file or a recipe ({known}); {error}") from None


def _refuse_booleans(source: str, values: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` for a truth value in the place of a number, which pydantic would read as 1 or 0."""
    for option, hint in get_type_hints(Recipe).items():
        value = values.get(option)
        found = value if isinstance(value, list) else [value]
        wrong = next((one for one in found if isinstance(one, bool)), None)
        if wrong is not None and {int, float} & {hint, *get_args(hint)}:
            raise ConfigurationError(f"{source}: {option}: {str(wrong).lower()} is refused; it must be a number")


def _problems(error: ValidationError) -> list[str]:
    """What pydantic refuses, in words."""
    known = tuple(field.name for field in fields(Recipe))
    found: list[str] = []
    for part in error.errors():
        key = named(part["loc"])
        if part["type"] != "unexpected_keyword_argument":
            found.append(refusal(key, part))
            continue
        meant = nearest(key, known)
        valid = f"it must be one of {', '.join(known)}" if meant is None else f"the nearest valid one is {meant}"
        found.append(f"{key}: unknown key; {valid}")
    return found


def _relative(option: str, value: Any, directory: Path) -> Any:
    if option not in _PATHS or value is None:
        return value
    found = [directory / with_home(option, str(one)) for one in (value if isinstance(value, tuple) else (value,))]
    return tuple(found) if isinstance(value, tuple) else found[0]
