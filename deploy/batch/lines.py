"""The lines of a batch file in OpenAI's format: requests in, responses and errors out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigurationError, shorten

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes that a line may name."""
MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of an input file."""

    custom_id: str
    url: str
    """One of `PATHS`."""
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One line of an output file: a response, or the reason why there is none."""

    custom_id: str | None
    """`None` where the line of the input has none."""
    line: int
    """The line of the input file, from 1."""
    status_code: int = 0
    request_id: str = ""
    body: Any = None
    code: str = ""
    """Why there is no response: `invalid_line` or `connection_error`. Empty for a response."""
    message: str = ""

    @property
    def is_answered(self) -> bool:
        """Whether the request was answered with status 200."""
        return self.status_code == 200

    def text(self) -> str:
        """The line, without its end."""
        response = {"status_code": self.status_code, "request_id": self.request_id, "body": self.body}
        error = {"code": self.code, "message": self.message, "line": self.line}
        return json.dumps(
            {
                "id": f"batch_req_{self.line}",
                "custom_id": self.custom_id,
                "response": None if self.code else response,
                "error": error if self.code else None,
            },
            ensure_ascii=False,
        )


class InvalidLine(Exception):
    """A line that is no request. `custom_id` is the line's, if it has one."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        self.custom_id = custom_id
        super().__init__(message)


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of every line that is not empty. Raises `ConfigurationError`."""
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--input-file {file}: needed a readable JSONL file; {error}") from None


def parse_line(text: str) -> BatchRequest:
    """The request of a line. Raises `InvalidLine`, which names the field, what was found and what is needed."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidLine(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidLine(f"{shorten(row)} is refused; it must be an object")
    custom_id = row.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        bound = f"a string of 1 to {MAX_ID_CHARS} characters"
        raise InvalidLine(f"custom_id: {shorten(custom_id)} is refused; it must be {bound}")
    method, url, body = row.get("method"), row.get("url"), row.get("body")
    if method != "POST":
        raise InvalidLine(f"method: {shorten(method)} is refused; it must be POST", custom_id)
    if not isinstance(url, str) or url not in PATHS:
        raise InvalidLine(f"url: {shorten(url)} is refused; it must be one of {', '.join(PATHS)}", custom_id)
    if not isinstance(body, dict):
        raise InvalidLine(f"body: {shorten(body)} is refused; it must be an object", custom_id)
    if body.get("stream"):
        raise InvalidLine(f"body.stream: {shorten(body['stream'])} is refused; it must be false", custom_id)
    return BatchRequest(custom_id, url, body)
