"""Runs the checks of one client and prints a JSON line for each. Needs nothing but Python."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

MESSAGES = [{"role": "user", "content": "Name three rivers."}]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The name of the city."}},
                "required": ["city"],
            },
        },
    }
]
TOOL_QUESTION = [{"role": "user", "content": "What is the weather in Paris? Call get_weather."}]
CHECKS: list[tuple[str, Callable[[], str]]] = []


def check(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a check. It returns a few words about what it saw, and raises if that is wrong."""

    def register(function: Callable[[], str]) -> Callable[[], str]:
        CHECKS.append((name, function))
        return function

    return register


def require(condition: object, found: object) -> None:
    """Raise with what was found, if the condition does not hold."""
    if not condition:
        raise ValueError(f"found {found!r}")


def arguments() -> tuple[str, str, str]:
    """The URL of the HTTP API, the address of the gRPC API, and the name of the model."""
    http_url, grpc_address, model, *_ = sys.argv[1:]
    return http_url, grpc_address, model


def run(*packages: str) -> None:
    """Run all checks. Prints the versions of the packages and one line per check."""
    sys.stdout.write(json.dumps({"versions": {name: version(name) for name in packages}}) + "\n")
    for name, function in CHECKS:
        try:
            found = {"check": name, "ok": True, "detail": function()}
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            found = {"check": name, "ok": False, "detail": f"{type(error).__name__}: {error} ({place})"[:600]}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
