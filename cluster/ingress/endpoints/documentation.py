"""`/openapi.json`, the schema of the HTTP API, and `/docs`, the same as a page. The page loads nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.ingress.endpoints.messages import ConversationBody, MessagesBody
from cluster.ingress.endpoints.responses_body import ResponsesBody
from cluster.ingress.endpoints.tokens import DetokenizeBody, TokenizeBody
from cluster.ingress.endpoints.verification import VerifyBody
from cluster.ingress.openai.parsing.parts import Json
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest

BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": ConversationBody,
    "/v1/verify": VerifyBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
"""The bodies of the routes that have one."""
_REFERENCE = "#/components/schemas/"
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PARTS = {"type": "array", "items": {"type": "object", "required": ["type"]}}
_FURTHER: Mapping[tuple[str, str], list[Json]] = {
    ("CompletionRequest", "prompt"): [{"type": "string"}, _TOKENS],
    ("CompletionRequest", "stop"): [{"type": "string"}],
    ("ChatRequest", "stop"): [{"type": "string"}],
    ("ChatTurn", "content"): [_PARTS, {"type": "null"}],
}
"""Forms of a field that are converted to the declared one."""
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; font-size: 1.1rem } code { font-family: ui-monospace, monospace }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; vertical-align: top; padding: .3rem .6rem }
tr { border-bottom: 1px solid #8884 } td:nth-child(2) { white-space: nowrap }
"""


def add_documentation(app: FastAPI) -> None:
    """Add both routes. Call it after all others were added."""

    def openapi() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation says

    @app.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(_page(app.openapi()))


def _schema(app: FastAPI) -> Json:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # routes with several methods get their own ids below
        schema: Json = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = sorted({(model, "validation") for model in BODIES.values()}, key=lambda pair: pair[0].__name__)
    _, found = models_json_schema(models, ref_template=f"{_REFERENCE}{{model}}")  # type: ignore[arg-type]
    components: Json = found.get("$defs", {})
    for (model, name), forms in _FURTHER.items():
        _widen(components[model]["properties"][name], forms)
    error = {"type": "object", "properties": {"error": {"type": "object"}}}
    schema["components"] = {"schemas": components | {"Error": error}}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            operation["operationId"] = f"{method} {path}"
            operation["responses"].pop("422", None)  # wrong values give 400
            operation["responses"]["default"] = _content("An error.", {"$ref": f"{_REFERENCE}Error"})
        if path in BODIES:
            body = _content(None, {"$ref": f"{_REFERENCE}{BODIES[path].__name__}"})
            operations["post"]["requestBody"] = body | {"required": True}
    return schema


def _widen(declared: Json, forms: list[Json]) -> None:
    """Let a field have further forms."""
    names = ("anyOf", "type", "items", "$ref")
    own = {name: declared.pop(name) for name in names if name in declared}
    declared["anyOf"] = [*own.get("anyOf", [own]), *forms]


def _content(description: str | None, schema: Json) -> Json:
    named = {} if description is None else {"description": description}
    return {**named, "content": {"application/json": {"schema": schema}}}


def _page(schema: Json) -> str:
    components = schema["components"]["schemas"]
    parts = "".join(
        _operation(f"{method.upper()} {path}", operation, components)
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    )
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f'<body><h1>{title}</h1><p>The schema for programs is at <a href="openapi.json">openapi.json</a>.</p>'
        f"{parts}</body></html>"
    )


def _operation(name: str, operation: Json, components: Json) -> str:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    model = components.get(_referenced(content.get("schema", {})), {})
    rows = "".join(_rows(model, set(model.get("required", ()))))
    table = f"<table><tr><th>field</th><th>type</th><th>meaning</th></tr>{rows}</table>" if rows else ""
    return f"<h2><code>{escape(name)}</code></h2>{table}"


def _rows(model: Json, required: set[str]) -> Iterator[str]:
    for name, field in model.get("properties", {}).items():
        mark = " (required)" if name in required else ""
        text = escape(str(field.get("description", "")))
        yield f"<tr><td><code>{escape(name)}</code>{mark}</td><td>{escape(_type(field))}</td><td>{text}</td></tr>"


def _type(field: Json) -> str:
    """Return the type of a field in a few words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(_type, field["anyOf"])))
    if "enum" in field or "const" in field:
        return ", ".join(str(value) for value in field.get("enum", [field.get("const")]))
    if "$ref" in field:
        return _referenced(field)
    kind: Any = field.get("type", "any")
    return f"list of {_type(field['items'])}" if kind == "array" and field.get("items") else str(kind)


def _referenced(schema: Json) -> str:
    return str(schema.get("$ref", "")).removeprefix(_REFERENCE)
