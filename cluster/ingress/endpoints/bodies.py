"""Reads and checks the bodies of HTTP requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request

from cluster.core.config.sections import LimitsSection
from cluster.ingress.asgi import read_body
from cluster.ingress.openai.fields.types import StrictModel, UnknownFields
from cluster.ingress.openai.parse import parse

IGNORED_FIELDS = "x-ignored-fields"
"""The header that names the fields of a body that are ignored."""

_Body = TypeVar("_Body", bound=StrictModel)


async def read_parsed(model: type[_Body], request: Request, limits: LimitsSection) -> tuple[_Body, Mapping[str, str]]:
    """Return the checked body, and headers that name the fields of it that are ignored. Raises `InvalidRequest`."""
    ignored = UnknownFields()
    unknown = ignored if limits.unknown_fields == "ignore" else None
    body = parse(model, await read_body(request, limits.max_body_bytes), unknown)
    for name in body.ignored_fields:
        ignored.add(name)
    return body, {IGNORED_FIELDS: ", ".join(ignored.names)} if ignored.names else {}
