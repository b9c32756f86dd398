"""References of JSON schemas: those that lead to a value work, and the others are named in the words of JSON Schema."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.core.errors import InvalidRequest
from cluster.core.grammar import Grammar
from cluster.generation.grammar.constraints import GrammarChecker
from cluster.generation.grammar.references import reference_problem
from tests.support.deadline import deadline
from tests.support.grammars import accepts
from tests.support.models import tiny_tokenizer

SECONDS = 60.0
SUPPORTED = "a reference to a schema inside of this one: #, #/$defs/name or #anchor"
LIBRARY = ("NoExtensionBias", "Pointer", "Resource", "json-schema:", "Unimplemented", "got ")
"""Words of the library, which say nothing to a client."""


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecker]:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("vocabulary"))
    checker = GrammarChecker(directory / "tokenizer.json")
    yield checker
    checker.close()


def node(child: dict[str, Any]) -> dict[str, Any]:
    """A schema whose definition `n` has a child, which may refer to it."""
    return {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"child": child}}}}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"$ref": "#"}, {"$ref": "#"}, "; this one leads back to itself with no value between"),
    ({"$ref": ""}, {"$ref": "#"}, "; this one leads back to itself with no value between"),
    ({"allOf": [{"$ref": "#"}]}, {"$ref": "#"}, "; this one leads back to itself with no value between"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a"},
        "; this one leads back to itself with no value between",
    ),
    ({"$ref": "#/definitions/none"}, {"$ref": "#/definitions/none"}, "; this place does not exist"),
    (node({"$ref": "#/$defs/m"}), {"$ref": "#/$defs/m"}, "; this place does not exist"),
    ({"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/2"}]}, {"$ref": "#/anyOf/2"}, "; this place does not exist"),
    ({"$ref": "#name"}, {"$ref": "#name"}, "; no $anchor has this name"),
    ({"$ref": "#/$defs/a", "$defs": {"a": 5}}, {"$ref": "#/$defs/a"}, "; no schema is at this place"),
    ({"$ref": "http://x/y.json"}, {"$ref": "http://x/y.json"}, "; schemas elsewhere are not fetched"),
    ({"$ref": "other.json"}, {"$ref": "other.json"}, "; schemas elsewhere are not fetched"),
    ({"$id": "http://x/s", "$ref": "b"}, {"$ref": "http://x/b"}, "; there is no such schema"),
    ({"$ref": 5}, {"$ref": 5}, ""),
    ({"$ref": None}, {"$ref": None}, ""),
    ({"$dynamicRef": "#a"}, {"$dynamicRef": "#a"}, ", in the keyword $ref"),
    ({"$recursiveRef": "#"}, {"$recursiveRef": "#"}, ", in the keyword $ref"),
    (
        node({"$ref": "#/$defs/n", "minProperties": 1}),
        {"$ref": "#/$defs/n"},
        "; one that leads back to a schema around it has no other keywords beside it",
    ),
]


@pytest.mark.parametrize(("schema", "reference", "reason"), REFUSED, ids=[json.dumps(one[0]) for one in REFUSED])
async def test_a_reference_that_cannot_be_followed_is_named(
    checker: GrammarChecker, schema: dict[str, Any], reference: dict[str, Any], reason: str
) -> None:
    async with deadline(SECONDS):
        with pytest.raises(InvalidRequest) as caught:
            await checker.check(Grammar.of_schema(schema))

    text = str(caught.value.renamed("response_format.json_schema.schema"))
    assert text.startswith(f"response_format.json_schema.schema: '{json.dumps(reference)}' is refused; it must be a")
    assert text.endswith(f"{SUPPORTED}{reason}")
    assert not any(word in text for word in LIBRARY)


LEAF = '{"child": {}}'
FOLLOWED: list[tuple[dict[str, Any], str, str]] = [
    (node({"$ref": "#/$defs/n"}), LEAF, '{"child": 5}'),
    (node({"$ref": "#/$defs/n", "description": "d", "default": None, "deprecated": True}), LEAF, '{"child": 5}'),
    (node({"allOf": [{"$ref": "#/$defs/n"}]}), LEAF, '{"child": 5}'),
    (node({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}), '{"child": {"child": null}}', '{"child": 5}'),
    ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]", "[5]"),
    ({"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "boolean"}}}, "true", "5"),
    ({"$id": "http://x/s", "$ref": "b", "$defs": {"x": {"$id": "b", "type": "boolean"}}}, "true", "5"),
    ({"$ref": "#/$defs/a~1%20b", "$defs": {"a/ b": {"type": "boolean"}}}, "true", "5"),
    ({"type": "object", "properties": {"$ref": {"type": "boolean"}}}, '{"$ref": true}', '{"$ref": 5}'),
    ({"const": {"$ref": "#/none"}}, '{"$ref": "#/none"}', "{}"),
]


@pytest.mark.parametrize(("schema", "good", "bad"), FOLLOWED, ids=[json.dumps(one[0]) for one in FOLLOWED])
async def test_a_reference_that_can_be_followed_constrains_the_answer(
    checker: GrammarChecker, schema: dict[str, Any], good: str, bad: str
) -> None:
    grammar = Grammar.of_schema(schema)
    async with deadline(SECONDS):
        assert await checker.check(grammar) == grammar
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


async def test_what_is_wrong_beside_references_is_not_blamed_on_them(checker: GrammarChecker) -> None:
    async with deadline(SECONDS):
        with pytest.raises(InvalidRequest, match="a JSON schema that can be compiled"):
            await checker.check(Grammar.of_schema(node({"type": "fish"})))


def test_a_long_chain_of_references_is_followed_in_linear_time() -> None:
    chain = {str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(3000)}
    schema = {"$ref": "#/$defs/0", "$defs": chain | {"3000": {"$ref": "#/$defs/1500"}}}
    before = time.process_time()
    found = reference_problem(schema, "")
    assert found is not None and "leads back to itself" in found[1]
    assert time.process_time() - before < 2
