"""Runs a batch file in OpenAI's format: so many requests in flight, each answered once, refusals repeated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

from cluster.core.errors import ConfigurationError, shorten
from deploy.network.https_client import JSON_HEADERS, LONGEST_PAUSE_SECONDS, TEMPORARY, retry_after, to_json, why_silent

Report = Callable[[float, str], None]
"""Called with the share of the lines that are done, and a description."""

_FIRST_PAUSE_SECONDS = 0.5
_CONNECTION_ATTEMPTS = 3


@dataclass(slots=True)
class BatchCounts:
    """Lines of an output file by outcome."""

    total: int = 0
    """Lines of the input file that are not empty."""
    answered: int = 0
    failed: int = 0

    def __str__(self) -> str:
        """For people: `2 of 3 lines answered, 1 failed`."""
        lines = "1 line" if self.total == 1 else f"{self.total} lines"
        return f"{self.answered} of {lines} answered, {self.failed} failed"


class BatchRun:
    """Answers the lines of one file through `client`, whose base address is the server's."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        concurrency: int,
        timeout_seconds: float,
        report: Report,
        counts: BatchCounts | None = None,
    ) -> None:
        """`timeout_seconds` bounds a line, including the time in which the server refuses it because it is busy.

        `counts` are filled while the lines end.
        """
        self._client = client
        self._concurrency = concurrency
        self._timeout_seconds = timeout_seconds
        self._report = report
        self._seen: set[str] = set()
        self.counts = counts or BatchCounts()

    async def run(self, source: Path, out: Path) -> BatchCounts:
        """Write one line per line of `source` into `out`, in the order in which they end. Raises `ConfigurationError`.

        A line is in the file as soon as it has ended, so that nothing is lost when the run is cancelled.
        """
        self.counts.total = total = sum(1 for _ in read_lines(source))
        if not total:
            raise ConfigurationError(f"--input-file {source}: needed at least one line, found none")
        lines = read_lines(source)
        try:
            # UTF-8 has no half of a surrogate pair. Replaced by a backslash and its code, it is one in JSON.
            opened = out.open("w", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigurationError(f"--output-file {out}: needed a file that can be written; {error}") from None
        with opened as file:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self._concurrency, total)):
                    tasks.create_task(self._work(lines, total, file))
        return self.counts

    async def _work(self, lines: Iterator[tuple[int, str]], total: int, file: TextIO) -> None:
        """Answer one line after another. Workers share the iterator, so that only lines in flight are in memory."""
        for number, text in lines:
            result = await self._answer(number, text)
            self.counts.answered += result.is_answered
            self.counts.failed += not result.is_answered
            file.write(f"{result.text()}\n")
            file.flush()
            done = self.counts.answered + self.counts.failed
            self._report(done / total, str(self.counts))

    async def _answer(self, number: int, text: str) -> BatchResult:
        try:
            request = parse_line(text)
            if request.custom_id in self._seen:
                raise InvalidLine(f"custom_id: {request.custom_id!r} is refused; it must be unique", request.custom_id)
        except InvalidLine as error:
            return BatchResult(error.custom_id, number, code="invalid_line", message=str(error))
        self._seen.add(request.custom_id)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._send(number, request)
        except TimeoutError:
            message = f"no answer within {self._timeout_seconds:g} s"
            return BatchResult(request.custom_id, number, code="timeout", message=message)

    async def _send(self, number: int, request: BatchRequest) -> BatchResult:
        """Send a request until the server answers it, or refuses it for good."""
        failures, pause = 0, _FIRST_PAUSE_SECONDS
        content = to_json(request.body)
        while True:
            try:
                response = await self._client.post(request.url, content=content, headers=JSON_HEADERS)
            except httpx.HTTPError as error:
                failures += 1
                if failures >= _CONNECTION_ATTEMPTS:
                    message = f"the server cannot be reached: {why_silent(error)}"
                    return BatchResult(request.custom_id, number, code="connection_error", message=message)
            else:
                failures += response.status_code == httpx.codes.BAD_GATEWAY  # a proxy that cannot reach the server
                if response.status_code not in TEMPORARY or failures >= _CONNECTION_ATTEMPTS:
                    return _result(request, number, response)
                pause = max(pause, retry_after(response))
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _result(request: BatchRequest, number: int, response: httpx.Response) -> BatchResult:
    try:
        body = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = response.text
    request_id = response.headers.get("x-request-id", "")
    return BatchResult(request.custom_id, number, response.status_code, request_id, body)


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
