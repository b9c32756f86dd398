"""Builds a checked `Configuration` from the values of a file and dotted overrides."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.core.config.base import Section
from cluster.core.config.draft_section import SELECTORS
from cluster.core.config.registry import Plugin, Registry
from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, shorten
from cluster.core.nearest import nearest

_LONGEST_KEY = 200
"""Number of characters of an unknown key that are compared with known keys and shown."""
_MOST_SUGGESTED = 3
"""Most settings that the refusal of an unknown key names."""


def load(
    values: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    plugins: Sequence[Registry[Plugin]] = (),
) -> Configuration:
    """Build the configuration from nested values and dotted overrides (`{"target.dtype": "bfloat16"}`).

    `plugins` are the registries whose plug-ins have sections and may be selected. Raises `ConfigurationError`, which
    names each refused key, its value and the bound; for an unknown key, the nearest valid ones.
    """
    merged = merge(values, overrides or {})
    problems = [problem for registry in plugins for problem in _build_plugin_settings(merged, registry)]
    try:
        configuration = Configuration.model_validate(merged)
    except ValidationError as error:
        problems = [*_explain(error, plugins), *problems]
    if problems:
        raise ConfigurationError("; ".join(problems))
    for registry in plugins:
        _check_selection(getattr(configuration, registry.section), registry)
    return configuration


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with dotted overrides on top, all unchecked.

    An override of `draft.method` or `draft.methods` replaces what `values` say under both. Raises
    `ConfigurationError` for an override below a plain value.
    """
    merged = _deep_copy(values)
    if any(overrides.get(key) for key in SELECTORS):
        for key in SELECTORS:
            _remove(merged, key)
    for key, value in overrides.items():
        _assign(merged, key, value)
    return merged


def known_keys(plugins: Sequence[Registry[Plugin]] = ()) -> tuple[str, ...]:
    """Every settable key, dotted: those of the sections in order of declaration, then those of plug-ins."""
    keys = list(_keys(Configuration))
    for registry in plugins:
        for name, plugin in registry.items():
            keys.extend(_keys(plugin.settings, f"{registry.section}.{name}."))
    return tuple(keys)


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in section.model_fields.items():
        inner = _section_of(info.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from _keys(inner, f"{prefix}{name}.")


def kind_of(key: str) -> Any:
    """The type of a dotted key of the sections; `None` if there is no such key."""
    section: type[BaseModel] | None = Configuration
    kind: Any = None
    for part in key.split("."):
        if section is None or part not in section.model_fields:
            return None
        kind = section.model_fields[part].annotation
        section = _section_of(kind)
    return kind


def _build_plugin_settings(values: dict[str, Any], registry: Registry[Plugin]) -> Iterator[str]:
    """Replace the values of each plug-in's section by its settings. Yield a message for each refused value."""
    section = values.setdefault(registry.section, {})
    if not isinstance(section, dict):
        return  # refused together with the other sections
    for name, plugin in registry.items():
        given = section.pop(name, None)
        try:
            section[name] = plugin.settings.model_validate({} if given is None else given)
        except ValidationError as error:
            yield from _explain(error, (registry,), (registry.section, name))


def _check_selection(section: Any, registry: Registry[Plugin]) -> None:
    """Raise `ConfigurationError` unless the selected plug-ins exist and have all that they need."""
    for name in section.selected(registry.key):
        settings = section.settings(name, registry.get(name).settings)
        try:
            settings.check_selected()
        except ValueError as error:
            raise ConfigurationError(
                f"{registry.section}.{name}: {error}, since {registry.selector} is {name}"
            ) from None


def _section_of(annotation: Any) -> type[Section] | None:
    """The section class inside an annotation such as `ModelSection | None`."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def _deep_copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deep_copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.get(section)
        if inner is None:
            inner = values[section] = {}
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{key}: {section} is not a section")
        values = inner
    values[last] = value


def _remove(values: dict[str, Any], key: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.get(section)
        if not isinstance(inner, dict):
            return
        values = inner
    values.pop(last, None)


def _explain(
    error: ValidationError, plugins: Sequence[Registry[Plugin]], prefix: tuple[str, ...] = ()
) -> Iterator[str]:
    for part in error.errors():
        steps = (*prefix, *part["loc"])
        key = named(steps)
        match part["type"]:
            case "extra_forbidden" | "is_instance_of":
                yield _unknown(".".join(str(step) for step in steps), plugins)
            case _:
                yield refusal(key, part)


def refusal(key: str, part: ErrorDetails) -> str:
    """Why pydantic refuses the value of a key that it knows: the key, the value and the bound."""
    match part["type"]:
        case "missing":
            return f"{key}: must be set"
        case "model_type":
            return f"{key}: {shorten(part['input'])} is refused; it must be a section with keys of its own"
        case "value_error":
            return f"{key}: {part['msg'].removeprefix('Value error, ')}"
        case "tuple_type":
            return f"{key}: {shorten(part['input'])} is refused; it must be a list, as in [a, b]"
        case _:
            reason = (part["msg"][0].lower() + part["msg"][1:]).replace("tuple", "list")
            return f"{key}: {shorten(part['input'])} is refused; {reason}"


def named(steps: Iterable[int | str]) -> str:
    """Join `("draft", "eagle", "taps", 0)` to `draft.eagle.taps[0]`. The branches of unions, no names, are left out."""
    parts = (f"[{step}]" if isinstance(step, int) else f".{step}" if step.isidentifier() else "" for step in steps)
    return "".join(parts).removeprefix(".")


def _unknown(key: str, plugins: Sequence[Registry[Plugin]]) -> str:
    for registry in plugins:
        for name, plugin in registry.items():
            for old, new in plugin.settings.renamed.items():
                if key == f"{registry.section}.{old}":
                    return f"{key}: unknown key; it is now {registry.section}.{name}.{new}"
    key = key[:_LONGEST_KEY]
    keys = known_keys(plugins)
    found = nearest(key, (*keys, *{known.rpartition(".")[0] for known in keys}))
    meant = _with_words_of(key, keys) if found is None else (found,)
    if not meant:
        return f"{key}: unknown key; deploy/docs/reference/settings.md lists all"
    return f"{key}: unknown key; the nearest valid {'one is' if len(meant) == 1 else 'ones are'} {', '.join(meant)}"


def _with_words_of(key: str, keys: Iterable[str]) -> tuple[str, ...]:
    """The settings whose last part has all words of that of `key`: those of its section, or else of any section."""
    section, _, last = key.rpartition(".")
    words = set(last.split("_"))
    by_distance: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for known in keys:
        place, _, name = known.rpartition(".")
        if words.issubset(name.split("_")):
            by_distance[0 if place == section else 1 if f"{place}.".startswith(f"{section}.") else 2].append(known)
    return tuple(next(filter(None, by_distance.values()), ())[:_MOST_SUGGESTED])
