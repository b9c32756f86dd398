"""The schema of the HTTP API and its page cover every route, and the page loads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.fakes.http_app import HI, HttpApi


def references(value: Any) -> Iterator[str]:
    """Every reference in a schema."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


async def test_every_reference_of_the_schema_has_its_target(api: HttpApi) -> None:
    schema = (await api.http.get("/openapi.json")).json()
    found = set(references(schema))
    assert len(found) > 8
    for reference in found:
        assert reference.startswith("#/components/schemas/")
        assert reference.rpartition("/")[2] in schema["components"]["schemas"], reference


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "stop": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "stop": ["x"]}),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/messages", {"messages": HI, "max_tokens": 4}),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_what_the_server_answers_fits_the_schema(api: HttpApi, path: str, body: dict[str, Any]) -> None:
    schema = (await api.http.get("/openapi.json")).json()
    declared = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**declared, "components": schema["components"]})
    assert not list(validator.iter_errors(body))
    assert (await api.http.post(path, json=body)).status_code == 200


async def test_the_page_names_every_route_and_field_and_loads_nothing(api: HttpApi) -> None:
    schema, page = (await api.http.get("/openapi.json")).json(), (await api.http.get("/docs")).text
    for path, operations in schema["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}" in page
    for name in schema["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{name}</code>" in page
    assert not re.search(r"<script|<link|<img|src=|@import|url\(|https?://", page)
