"""Reads and checks the bodies of HTTP requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.ingress.asgi import read_body
from cluster.ingress.openai.fields.types import IN_VOCABULARY, StrictModel, UnknownFields
from cluster.ingress.openai.parse import parse

logger = logging.getLogger(__name__)

IGNORED_FIELDS = "x-ignored-fields"
"""The header that names the fields of a body that are ignored."""

MISSPELT_FIELDS = "x-misspelt-fields"
"""The header that names ignored fields that are probably misspelt, as `temprature=temperature`."""

_TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
"""Names of fields that are lists of token ids."""
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Names of the field for the most tokens of an answer."""

_Body = TypeVar("_Body", bound=StrictModel)


async def read_parsed(model: type[_Body], request: Request, limits: LimitsSection) -> tuple[_Body, Mapping[str, str]]:
    """Return the checked body, and headers that name the fields of it that are ignored. Raises `InvalidRequest`."""
    ignored = UnknownFields()
    unknown = ignored if limits.unknown_fields == "ignore" else None
    try:
        body = parse(model, await read_body(request, limits.max_body_bytes), unknown)
    except InvalidRequest as error:
        raise _with_true_bound(error, limits) from None
    for name in body.ignored_fields:
        ignored.add(name)
    headers = {IGNORED_FIELDS: ", ".join(ignored.names)} if ignored.names else {}
    if ignored.misspelt:
        headers[MISSPELT_FIELDS] = ", ".join(f"{name}={meant}" for name, meant in ignored.misspelt)
        for name, meant in ignored.misspelt:
            logger.info("a request has the unknown field %s, which is ignored; did it mean %s?", name, meant)
    return body, headers


def _with_true_bound(error: InvalidRequest, limits: LimitsSection) -> InvalidRequest:
    """Return the error, for token ids and lengths with the bound that a less wrong value would be told."""
    if type(error.value) is int and error.field.partition("[")[0] in _TOKEN_LISTS:
        return InvalidRequest(error.field, error.value, IN_VOCABULARY)
    if error.field not in _LENGTHS or type(error.value) is not int:
        return error
    most = limits.max_output_tokens
    return InvalidRequest(
        error.field,
        error.value,
        f"between 1 and {most}" if most else "at least 1, and at most the context of the model",
    )
