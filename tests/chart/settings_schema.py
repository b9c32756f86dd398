"""Makes the parts of the chart that repeat the configuration's classes and presets.

`$defs` of `values.schema.json` has the JSON schema of `settings`, so that a wrong setting is refused when the chart is
rendered. `files/presets.yaml` has what the chart must know of a preset to refuse pods that cannot run its model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from cluster.core.answer_format_rows import call_format_names, reasoning_format_names
from cluster.core.config.load import merge
from cluster.core.config.sections import Configuration
from deploy.settings import presets, read_values
from tests.support.chart.rendering import CHART
from workers.forward.backends.choice import backend_names
from workers.serve.configuration import PLUGINS, load_configuration

SCHEMA = CHART / "values.schema.json"
PRESETS = CHART / "files" / "presets.yaml"
_PREFIX = "settings"
_MEMORY_BYTES = {"cpu": 1 << 30, "gpu": 24 << 30}
"""Least memory of a target's pod with each preset's model: its weights pass through the host's memory."""
_DROPPED = ("title", "default", "required")
"""A preset sets what the values leave out, so nothing is required."""

_TARGET_CHOICES = {
    "attention_backend": backend_names(),
    "tool_parser": ("auto", *call_format_names()),
    "reasoning_parser": ("auto", "none", *reasoning_format_names()),
}
"""Settings of the target whose values are names in tables of the code."""

Schema = dict[str, Any]


def generated() -> dict[Path, str]:
    """The text of each generated file."""
    schema = json.loads(SCHEMA.read_text("utf-8"))
    kept = {name: one for name, one in schema["$defs"].items() if name.partition(".")[0] != _PREFIX}
    schema["$defs"] = kept | settings_schemas()
    header = "# Made from the presets by `make chart`: what a pod must have to run a preset's model.\n"
    return {
        SCHEMA: json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
        PRESETS: header + yaml.safe_dump({name: _preset(name) for name in presets()}, sort_keys=True),
    }


def settings_schemas() -> Schema:
    """The JSON schema of a configuration whose values may be partial, as definitions whose names begin alike."""
    whole = Configuration.model_json_schema()
    sections = whole.pop("$defs")
    for registry in PLUGINS:
        section = sections[whole["properties"][registry.section]["$ref"].rpartition("/")[2]]
        section["additionalProperties"] = False
        _choose(section["properties"], registry.key, list(registry.names()))
        for name, plugin in registry.items():
            settings = plugin.settings.model_json_schema()
            sections |= settings.pop("$defs", {}) | {f"{registry.section}.{name}": settings}
            # A plug-in may be called as a key of its section is.
            section["properties"].setdefault(name, {"$ref": f"#/$defs/{registry.section}.{name}"})
    for name, values in _TARGET_CHOICES.items():
        _choose(sections["TargetSection"]["properties"], name, list(values))
    definitions = {_PREFIX: whole} | {f"{_PREFIX}.{name}": one for name, one in sorted(sections.items())}
    return {name: _relaxed(one) for name, one in definitions.items()}


def _choose(properties: Schema, key: str, names: list[str]) -> None:
    """Let the keys that select plug-ins, one (`key`) or a list (`key` in the plural), take known names only."""
    for name in (key, f"{key}s"):
        for part in [one for one in (properties.get(name),) if one]:
            for option in (part, part.get("items", {}), *part.get("anyOf", ())):
                if option.get("type") == "string":
                    option["enum"] = names


def _relaxed(schema: Any, *, names: bool = False) -> Any:
    """A schema without what only full configurations have. Its references are those of `settings_schemas`.

    `names` says that the keys of `schema` are names of properties.
    """
    if isinstance(schema, list):
        return [_relaxed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    relaxed = {}
    for key, value in schema.items():
        if names:
            relaxed[key] = _relaxed(value)
        elif key == "$ref":
            relaxed[key] = value.replace("#/$defs/", f"#/$defs/{_PREFIX}.")
        elif key == "description":
            relaxed[key] = " ".join(value.split())
        elif key == "enum":
            relaxed[key] = sorted(value)  # `typing` keeps the order of whichever equal `Literal` was imported first
        elif key not in _DROPPED:
            relaxed[key] = _relaxed(value, names=key == "properties")
    return relaxed


def _preset(name: str) -> Schema:
    configuration = load_configuration(merge(read_values(name), {}))
    target, threshold = configuration.target, configuration.cluster.memory_threshold
    needed = {"path": target.path, "device": target.device, "tensor_parallel": target.tensor_parallel}
    return {"memory_bytes": _MEMORY_BYTES[name], "memory_threshold": threshold, "target": needed}
