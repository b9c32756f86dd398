"""Parses the body of an HTTP request to a checked model of `cluster.ingress.openai.requests`."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

from pydantic import ValidationError

from cluster.core.bounds import MAX_JSON_DEPTH
from cluster.core.errors import InvalidRequest, UnsupportedParameter
from cluster.core.json_text import WHOLE, find_half, find_infinite, is_deeper_than
from cluster.core.nearest import nearest
from cluster.ingress.openai.fields.types import StrictModel, UnknownFields
from cluster.ingress.openai.fields.unsupported import Unsupported
from cluster.ingress.openai.requests import Parameters

_MAX_NAME_CHARS = 64
"""Longer names are cut before they are compared or reported."""
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""What a body has that holds a surrogate. Most bodies have none, and are not searched."""

_Request = TypeVar("_Request", bound=StrictModel)


def parse(model: type[_Request], body: bytes, unknown: UnknownFields | None = None) -> _Request:
    """Parse a request body. Unknown fields are noted in `unknown` and left out, or refused if it is `None`.

    Raises `InvalidRequest` (`body` when it is not a JSON object) and `UnsupportedParameter`.
    """
    values = {name: value for name, value in _read_object(body).items() if value is not None}
    if _ESCAPED_HALF.search(body) is not None:
        _refuse_halves({name: value for name, value in values.items() if name in model.model_fields})
    for name, parameter in model.unsupported.items():
        if name in values:
            _refuse_unless_neutral(name, values.pop(name), parameter)
    for name in values:
        if unknown is None and name not in model.model_fields:
            raise _unknown_parameter(name, (*model.model_fields, *model.unsupported))
    try:
        request = model.model_validate(values, context=unknown)
    except ValidationError as error:
        raise _first_error(error, values) from None
    if isinstance(request, Parameters) and request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", values["stream_options"], "left out unless stream is true")
    return request


def _read_object(body: bytes) -> dict[str, Any]:
    too_deep = InvalidRequest("body", f"{len(body)} bytes", f"JSON that is nested at most {MAX_JSON_DEPTH} levels deep")
    has_infinite = False

    def number(text: str) -> float:
        nonlocal has_infinite
        value = float(text)
        has_infinite = has_infinite or not math.isfinite(value)
        return value

    try:
        value = json.loads(body.decode("utf-8"), parse_float=number, parse_constant=number)
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", body[error.start : error.start + 1], f"UTF-8; byte {error.start} is not") from None
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InvalidRequest("body", body, f"JSON: {reason}") from None
    if is_deeper_than(value, MAX_JSON_DEPTH):
        raise too_deep
    if not isinstance(value, dict):
        raise InvalidRequest("body", value, "a JSON object")
    if has_infinite and (found := find_infinite(value)) is not None:
        raise InvalidRequest(found[0][:_MAX_NAME_CHARS], found[1], "a finite number, as all numbers of JSON are")
    return value


def _refuse_halves(values: dict[str, Any]) -> None:
    found = find_half(values)
    if found is not None:
        raise InvalidRequest(found[0][:_MAX_NAME_CHARS], found[1], WHOLE)


def _refuse_unless_neutral(name: str, value: object, parameter: Unsupported) -> None:
    neutral = parameter.neutral
    if any(type(value) is type(entry) and value == entry for entry in neutral):
        return
    accepted = f"{json.dumps(neutral[0])} or left out" if neutral else "left out"
    raise UnsupportedParameter(name, value, f"{accepted}: {parameter.reason}")


def _unknown_parameter(name: str, known: tuple[str, ...]) -> InvalidRequest:
    shown = name[:_MAX_NAME_CHARS]
    found = nearest(shown, known)
    return InvalidRequest(shown, shown, "a known parameter" + ("" if found is None else f"; the nearest is {found}"))


def _first_error(error: ValidationError, values: dict[str, Any]) -> InvalidRequest:
    """Convert pydantic's first error for some values to the form of all other errors."""
    part, *others = error.errors(include_url=False)
    steps, branch = part["loc"], len(part["loc"]) - 1
    is_of_union = part["type"] != "missing" and part["input"] is _at(values, steps[:branch])
    if is_of_union and isinstance(part["input"], dict | list):  # the branch that reads the value says more
        inside = (one for one in others if one["loc"][:branch] == steps[:branch] and len(one["loc"]) > len(steps))
        if (found := next(inside, None)) is not None:
            part, steps = found, (*found["loc"][:branch], *found["loc"][branch + 1 :])
    field = _path(steps)
    if part["type"] == "missing":
        return InvalidRequest(field, None, "present")
    if part["type"] == "extra_forbidden":
        return InvalidRequest(field, part["input"], "left out: it is not a known field")
    return InvalidRequest(field, part["input"], part["msg"].removeprefix("Input should be "))


def _at(value: Any, steps: tuple[int | str, ...]) -> object:
    """Return the value at a path; `None` if there is none."""
    for step in steps:
        try:
            value = value[step]
        except (LookupError, TypeError):
            return None
    return value


def _path(steps: tuple[int | str, ...]) -> str:
    """Join `("messages", 2, "role")` to `messages[2].role`. Names of union branches, as `list[str]`, are left out."""
    path = ""
    for step in steps:
        if isinstance(step, str) and "[" in step:
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")[:_MAX_NAME_CHARS]
