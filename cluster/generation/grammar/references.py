"""Why a reference in a JSON schema cannot be followed. The library of grammars says it in terms of its own.

It resolves references to places (`#/$defs/name`), to anchors (`#name`) and to schemas with an `$id` inside of the same
schema, and reads nothing from elsewhere. What refers to itself may do so wherever a value stands between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from cluster.core.json_schema import place_of, schemas_in

_SUPPORTED = "a reference to a schema inside of this one: #, #/$defs/name or #anchor"
_CIRCULAR = re.compile(r"circular references with sibling keys are not supported: \S*?(#\S*)")
"""What the library says of a reference that must hold together with other keywords, at each level again."""

_UNRESOLVED = re.compile(r"(?:Resource|Pointer|Anchor) '([^']*)' (?:is not present|does not exist)")
"""What it says of one that names no schema, as resolved by the `$id` around it."""


def reference_problem(schema: object, error: str) -> tuple[str, str] | None:
    """Return a reference of a schema that cannot be followed, as JSON, and what it must be; `None` if all can.

    `error` is what the library says of the schema. The time is linear in the schema's size.
    """
    if circular := _CIRCULAR.search(error):
        bound = f"{_SUPPORTED}; one that leads back to a schema around it has no other keywords beside it"
        return _shown("$ref", circular[1]), bound
    parts = list(schemas_in(schema))
    anchors = {f"#{part['$anchor']}" for part in parts if isinstance(part.get("$anchor"), str)}
    has_ids = any(isinstance(part.get("$id", part.get("id")), str) for part in parts)
    for part in parts:
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in part:
                return _shown(keyword, part[keyword]), f"{_SUPPORTED}, in the keyword $ref"
        if "$ref" in part and (fault := _fault(schema, part["$ref"], anchors, has_ids=has_ids)):
            return _shown("$ref", part["$ref"]), fault
    if (circle := _circle(schema, parts)) is not None:
        return _shown("$ref", circle), f"{_SUPPORTED}; this one leads back to itself with no value between"
    if elsewhere := _UNRESOLVED.search(error):
        return _shown("$ref", elsewhere[1]), f"{_SUPPORTED}; there is no such schema"
    return None


def _fault(root: object, reference: object, anchors: set[str], *, has_ids: bool) -> str:
    """Return what one reference must be; empty where nothing is wrong with it, or where that is not known."""
    if not isinstance(reference, str):
        return f"a string, {_SUPPORTED}"
    if has_ids:  # its places may be those of another schema inside of this one
        return ""
    if not reference.startswith("#") and reference:
        return f"{_SUPPORTED}; schemas elsewhere are not fetched"
    if reference in ("", "#"):
        return ""
    if not reference.startswith("#/"):
        return "" if reference in anchors else f"{_SUPPORTED}; no $anchor has this name"
    found, is_there = place_of(root, reference)
    if not is_there:
        return f"{_SUPPORTED}; this place does not exist"
    return "" if isinstance(found, dict | bool) else f"{_SUPPORTED}; no schema is at this place"


def _circle(root: object, parts: list[dict[str, Any]]) -> str | None:
    """Return a reference that leads back to itself through references and `allOf` alone; `None` without one."""
    names: dict[tuple[int, int], str] = {}
    order: TopologicalSorter[int] = TopologicalSorter()
    for part in parts:
        for reference, required in _required(root, part):
            names.setdefault((id(required), id(part)), reference)
            order.add(id(part), id(required))
    try:
        order.prepare()
    except CycleError as error:
        return next(names[pair] for pair in pairwise(error.args[1]) if names[pair])
    return None


def _required(root: object, schema: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the schemas that hold for the same value as this one, each with the reference that names it or none."""
    reference, together = schema.get("$ref"), schema.get("allOf")
    if isinstance(reference, str) and (reference in ("", "#") or reference.startswith("#/")):
        yield reference or "#", place_of(root, reference)[0]
    if isinstance(together, list):
        yield from (("", part) for part in together)


def _shown(keyword: str, reference: object) -> str:
    return json.dumps({keyword: reference}, ensure_ascii=False)
