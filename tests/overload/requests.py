"""Raw HTTP/1.1 requests over asyncio's sockets: light enough for thousands at once on the server's own machine."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Outcome:
    """What one client received."""

    status: int
    """0 for a connection that was refused or broke off."""
    retry_after: str = ""
    is_complete: bool = False
    """Whether a body of status 200 has its end."""
    seconds: float = 0.0
    error: str = ""

    @property
    def kind(self) -> str:
        """`answered`, `refused` with status 429 and `Retry-After`, or what was lost."""
        if self.status == 200 and self.is_complete:
            return "answered"
        if self.status == 429 and self.retry_after.isdigit():
            return "refused"
        if self.status in (200, 429):
            return "200 without its end" if self.status == 200 else "429 without Retry-After"
        return f"status {self.status}" if self.status else self.error


def body_of(model: str, number: int, max_tokens: int) -> dict[str, object]:
    """The body of one client. Every second client streams."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Write the number {number} in words."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": number % 2 == 1,
    }


async def post(url: str, body: dict[str, object], longest_seconds: float) -> Outcome:
    """Post a chat on a connection of its own and read all of the response."""
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(longest_seconds):
            status, headers, content = await _exchange(url, body)
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        return Outcome(0, seconds=time.perf_counter() - begun, error=type(error).__name__)
    seconds = time.perf_counter() - begun
    return Outcome(status, headers.get("retry-after", ""), status == 200 and _is_complete(body, content), seconds)


async def _exchange(url: str, body: dict[str, object]) -> tuple[int, dict[str, str], bytes]:
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(head.encode() + content)
        await writer.drain()
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        return int(first.split(" ")[1]), headers, await reader.read()
    finally:
        writer.close()


def _is_complete(body: dict[str, object], content: bytes) -> bool:
    """Whether the answer ended: a stream with its last event, another answer with its reason."""
    if body["stream"]:
        return b"data: [DONE]" in content and b'"error"' not in content
    return b'"finish_reason"' in content and content.rstrip(b"0\r\n").endswith(b"}")
