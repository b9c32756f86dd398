"""Other versions of HTTP than 1.1: offers to upgrade a connection, which are ignored, and answers over HTTP/1.0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_OFFER_HEADERS = frozenset({b"upgrade", b"http2-settings"})
"""Headers of an offer, which are also options of the header `connection`."""


class Http1Parser:
    """A parser of HTTP/1 requests that reads an offer to upgrade the connection as if it were not there.

    The parser of `httptools` stops behind the headers of such a request and takes the body for bytes of the other
    protocol. Clients that offer HTTP/2 (`Upgrade: h2c`) with a body, as Java's client does, then go on with HTTP/1.1
    unless the server accepts. Here the request is parsed again without the offer, then its body.
    """

    def __init__(self, protocol: Any) -> None:
        """`protocol` has the callbacks of `httptools`, and the attributes `url` and `headers` of uvicorn's protocol."""
        self._protocol = protocol
        self._parser = httptools.HttpRequestParser(protocol)

    @property
    def skips(self) -> bool:
        """Whether the request that the callbacks report is an offer, and will be reported again without it."""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parse. Raises the errors of `httptools`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self.skips:
                raise
            request = self._without_offer()
            self._parser = httptools.HttpRequestParser(self._protocol)
            self._parser.feed_data(request)
            self.feed_data(data[offer.args[0] :])

    def _without_offer(self) -> bytes:
        version = self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self._parser.get_method(), self._protocol.url, version)]
        lines += (b"%s: %s" % header for header in _without_offers(self._protocol.headers))
        return b"\r\n".join([*lines, b"", b""])

    def should_upgrade(self) -> bool:
        """Whether the connection changes its protocol; it never does."""
        return False

    def should_keep_alive(self) -> bool:
        """Whether the connection may serve another request."""
        return bool(self._parser.should_keep_alive())

    def get_http_version(self) -> str:
        """Return the version of the request, such as `1.1`."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """Return the method of the request."""
        return bytes(self._parser.get_method())


def _without_offers(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"connection":
            options = (option.strip() for option in value.split(b","))
            value = b", ".join(option for option in options if option.lower() not in _OFFER_HEADERS)
        if name not in _OFFER_HEADERS:
            yield name, value


def until_closed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Return the app with answers for an HTTP/1.0 client, which knows no chunks: one without a length ends by closing.

    `cycle` is uvicorn's record of the request. uvicorn closes every connection of HTTP/1.0 after the answer.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name.lower() != b"transfer-encoding"]
                has_length = any(name.lower() == b"content-length" for name, _ in headers)
                message = {**message, "headers": headers}
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return wrapped
