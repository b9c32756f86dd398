"""The page of every setting: its key, what it may be, its default and its meaning, from the configuration's classes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.core.config.sections import Configuration
from workers.serve.configuration import PLUGINS

PRESETS = Path(__file__).resolve().parents[2] / "deploy" / "presets"
_HEAD = """# Settings

Every setting of `pilotfish serve` (`--set KEY=VALUE`, a YAML file or the chart's `settings`). This page is generated
from the code by `make pages`. [Settings by task](../settings.md) says which ones matter.

A preset (`--config cpu`, `--config gpu`) sets other values where its column says so.
"""
_BOUNDS = (("minimum", "≥ "), ("exclusiveMinimum", "> "), ("maximum", "≤ "), ("exclusiveMaximum", "< "))

Schema = Mapping[str, Any]


def page() -> str:
    """Return the page, in Markdown."""
    schema = Configuration.model_json_schema()
    presets = {file.stem: yaml.safe_load(file.read_text("utf-8")) for file in sorted(PRESETS.glob("*.yaml"))}
    lines = [_HEAD]
    plain = {name: field for name, field in schema["properties"].items() if "$ref" not in field}
    lines += _section("", {"properties": plain, "description": "Settings of no section."}, {}, presets)
    for name, field in schema["properties"].items():
        if name in plain:
            continue
        section = schema["$defs"][field["$ref"].rpartition("/")[2]]
        lines += _section(name, section, schema["$defs"], presets)
    for registry in PLUGINS:
        for plugin_name, plugin in registry.items():
            settings = plugin.settings.model_json_schema()
            if settings.get("properties"):
                prefix = f"{registry.section}.{plugin_name}"
                lines += _section(prefix, settings, settings.get("$defs", {}), presets)
    return "\n".join(lines)


def _section(name: str, section: Schema, kinds: Mapping[str, Schema], presets: Mapping[str, Any]) -> Iterator[str]:
    titles = [f"`{preset}`" for preset in presets]
    yield f"## `{name}`\n" if name else "## General\n"
    yield f"{_one_line(section.get('description', ''))}\n"
    yield f"| setting | value | default | {' | '.join(titles)} | meaning |"
    yield "|---" * (4 + len(titles)) + "|"
    for key, kind, default, meaning in _rows(name, section, kinds):
        others = [_preset(values, key) for values in presets.values()]
        yield f"| `{key}` | {kind} | {default} | {' | '.join(others)} | {meaning} |"
    yield ""


def _rows(prefix: str, section: Schema, kinds: Mapping[str, Schema]) -> Iterator[tuple[str, str, str, str]]:
    for name, field in section.get("properties", {}).items():
        key = f"{prefix}.{name}" if prefix else name
        reference = field.get("$ref") or next((one["$ref"] for one in field.get("anyOf", ()) if "$ref" in one), None)
        if reference is not None:
            inner = kinds[reference.rpartition("/")[2]]
            yield from _rows(key, inner, kinds)
            continue
        yield key, _kind(field), _value(field.get("default")), _one_line(field.get("description", ""))


def _kind(field: Schema) -> str:
    """What the value may be: its choices, or its type and bounds."""
    if "enum" in field:
        # Sorted: `typing` keeps the order of whichever equal `Literal` was imported first.
        return ", ".join(f"`{choice}`" for choice in sorted(field["enum"]))
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"] if one.get("type") != "null")
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    bounds = " ".join(f"{sign}{field[bound]}" for bound, sign in _BOUNDS if bound in field)
    return " ".join(filter(None, (str(field.get("type", "value")), bounds)))


def _preset(values: Mapping[str, Any], key: str) -> str:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return ""
        values = values[part]
    return _value(values)


def _value(value: object) -> str:
    return "unset" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`".replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
