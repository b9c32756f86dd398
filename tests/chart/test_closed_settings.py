"""A setting whose values are a closed set is closed in the chart's schema, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest

from cluster.core.errors import ConfigurationError, ModelLoadError
from deploy.settings import settings_from_arguments
from tests.chart.settings_schema import SCHEMA
from tests.support.chart.rendering import render

DEFINITIONS = json.loads(SCHEMA.read_text("utf-8"))["$defs"]
WRONG = "no-such-value"


def alternatives(schema: Any) -> Iterator[Any]:
    """The schema, its alternatives, and what they refer to."""
    yield DEFINITIONS[schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else schema
    for key in ("anyOf", "allOf"):
        for part in schema.get(key, ()):
            yield from alternatives(part)


def texts(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings that take texts, each with its schema."""
    for part in alternatives(schema):
        if part.get("type") == "string":
            yield path, part
        for key, value in part.get("properties", {}).items():
            yield from texts(value, f"{path}.{key}".lstrip("."))


SETTINGS = dict(texts(DEFINITIONS["settings"]))
OPEN = sorted(key for key, schema in SETTINGS.items() if "enum" not in schema)
CLOSED = sorted(key for key, schema in SETTINGS.items() if "enum" in schema)


def refusal(key: str, value: str) -> str:
    """What Pilotfish says of a value; empty if it takes it, or refuses it for what is on this machine."""
    try:
        settings_from_arguments({key: value}, {})
    except ConfigurationError as error:
        return str(error)
    except ModelLoadError:
        pass
    return ""


@pytest.mark.parametrize("key", OPEN)
def test_a_setting_that_is_open_in_the_schema_is_no_choice(key: str) -> None:
    assert "must be one of" not in refusal(key, WRONG), f"the schema must have the choices of {key}"


@pytest.mark.parametrize("key", ["target.attention_backend", "target.tool_parser", "target.reasoning_parser"])
def test_names_in_tables_of_the_code_are_choices(key: str) -> None:
    assert key in CLOSED
    section, _, name = key.partition(".")
    with pytest.raises(helm_python.HelmError, match=name):
        render({"settings": {section: {name: WRONG}}})
    render({"settings": {section: {name: "auto"}}})


@pytest.mark.parametrize("key", [key for key in CLOSED if key.startswith("target.")])
def test_the_choices_of_the_schema_are_those_of_the_setting(key: str) -> None:
    for value in SETTINGS[key]["enum"]:
        assert "must be one of" not in refusal(key, value)
    assert key.rpartition(".")[2] in refusal(key, WRONG)
