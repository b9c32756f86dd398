"""Makes the table of values in the chart's README from the comments in `values.yaml`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import yaml

from tests.support.chart.rendering import CHART

VALUES = CHART / "values.yaml"
README = CHART / "README.md"
_BEGIN, _END = "<!-- values: begin -->", "<!-- values: end -->"
_MAPS = {"settings", "rayStartParams", "nodeSelector", "affinity", "labels", "annotations", "storage"}
"""Keys whose values are maps of the user's own keys."""


def with_values_table(readme: str, values: str) -> str:
    """The README with the table for `values`, the text of `values.yaml`."""
    before, rest = readme.split(_BEGIN)
    after = rest.split(_END)[1]
    rows = [f"| `{key}` | {text} | `{default}` |" for key, default, text in document(values)]
    table = "\n".join(["| value | meaning | default |", "|---|---|---|", *rows])
    return f"{before}{_BEGIN}\n{table}\n{_END}{after}"


def document(values: str) -> Iterator[tuple[str, str, str]]:
    """Each value's dotted key, default and comment. Groups describe their keys once, under `workers.target`."""
    lines = values.splitlines()
    described: dict[str, str] = {}
    for key, node in _leaves(yaml.compose(values)):
        text = _comment(lines, node[0].start_mark.line)
        if key.startswith("workers."):
            name = key.split(".", 2)[2]
            described.setdefault(name, text)
            text = text or f"As `workers.target.{name}`."
        yield key, json.dumps(yaml.safe_load(yaml.serialize(node[1]))).replace("|", "\\|"), text.replace("|", "\\|")


def _leaves(node: yaml.MappingNode, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[yaml.Node, yaml.Node]]]:
    for name, value in node.value:
        inner = (*path, name.value)
        if isinstance(value, yaml.MappingNode) and value.value and name.value not in _MAPS:
            yield from _leaves(value, inner)
        else:
            yield ".".join(inner), (name, value)


def _comment(lines: list[str], line: int) -> str:
    """The comment lines right above a line, as one text."""
    found: list[str] = []
    while line > 0 and (match := re.match(r"\s*# ?(.*)", lines[line - 1])):
        found.insert(0, match[1])
        line -= 1
    return " ".join(found)


def table_page() -> str:
    """The README as it should be."""
    return with_values_table(README.read_text("utf-8"), VALUES.read_text("utf-8"))
