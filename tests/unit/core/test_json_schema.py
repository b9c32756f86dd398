"""What a JSON schema allows."""

from __future__ import annotations

from cluster.core.json_schema import types_of


def test_types_are_found_through_many_references_at_once() -> None:
    parts = {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 100} for at in range(7)}
    schema = {"$defs": {**parts, "7": {"type": "string"}, "a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}}}
    assert types_of({"$ref": "#/$defs/4"}, schema) == {"string"}
    assert types_of({"$ref": "#/$defs/0"}, schema) is None  # too far
    assert types_of({"$ref": "#/$defs/a"}, schema) is None
