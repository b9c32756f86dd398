"""HTTP connections with bounds on the bytes and the time that a client may take.

uvicorn and Ray Serve's proxy bound neither the size of headers, nor the time of headers and bodies, nor how long a
client may leave its answer unread.
"""

from __future__ import annotations

import asyncio
import enum
import ssl
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cluster.ingress.connections.http_versions import Http1Parser, until_closed
from cluster.ingress.connections.tls import server_tls
from cluster.ingress.openai.errors import ErrorResponse

KIB = 1024
_LINGER_SECONDS = 1.0
"""How long a connection stays after a refusal, while what still arrives is dropped, in seconds."""


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """What one client may take of an HTTP server."""

    head_bytes: int = 64 * KIB
    """Most bytes of request line and headers; more is refused with status 431."""
    head_seconds: float = 10.0
    """Longest time from the first byte of a request, or from the connection, to the end of the headers."""
    body_seconds: float = 60.0
    """Longest time from the end of the headers to the end of the body."""
    unread_bytes: int = 256 * KIB
    """Bytes of an answer that wait for the client, before the answer waits too."""
    unread_seconds: float = 10.0
    """How often an answer that waits is looked at, in seconds."""
    least_read_bytes: int = 64 * KIB
    """Fewest bytes that a client must read between two looks; otherwise its connection ends."""


class _Reading(enum.Enum):
    """What the server reads of a connection."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with bounds. It also demands the certificates of clients and takes over changed files.

    A connection stays with HTTP/1: offers to upgrade it are ignored. Clients of HTTP/1.0 get no chunks.
    """

    bounds = ConnectionBounds()

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """uvicorn calls this for every connection, before its TLS handshake begins."""
        super().__init__(config, server_state, app_state, _loop)
        self._http1_parser = Http1Parser(self)
        self.parser = self._http1_parser  # type: ignore[assignment]  # it has all that uvicorn calls
        self._tls = server_tls(config)
        if self._tls is not None:
            self._tls.renew()
        self._reading = _Reading.NOTHING
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self._message_bytes = 0  # of the current message, as received
        self._head_bytes = 0  # of request line, headers and trailers, as parsed
        self._body_bytes = 0
        self._refusal: ErrorResponse | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin to wait for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self.bounds.unread_bytes)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if self._tls is not None and self._tls.demands_certificate and (tls is None or not tls.getpeercert()):
            transport.abort()
            return
        self._read(_Reading.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_reading_timer()
        self._stop_writing_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what the client sent, and refuse headers that are too long."""
        if self._refusal is not None:
            return
        self._message_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._reading is _Reading.HEAD and self._message_bytes > self.bounds.head_bytes:
            self._refuse_head()
            self.send_400_response("")
        elif self._reading is _Reading.BODY and self._has_much_framing():
            self.transport.abort()
        elif self._reading is _Reading.NOTHING and self.timeout_keep_alive_task is None and self._is_idle():
            self._read(_Reading.HEAD)  # line ends before a request: the client has begun to send one

    # --- callbacks of the parser ---

    def on_message_begin(self) -> None:
        """Begin to count the bytes of a request."""
        super().on_message_begin()
        self._head_bytes = self._body_bytes = 0
        if self._reading is not _Reading.HEAD:
            self._message_bytes = 0
            self._read(_Reading.HEAD)

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the request line."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header."""
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to wait for the body."""
        if self._http1_parser.skips:
            return
        self._message_bytes = 0
        self._read(_Reading.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count the bytes of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Watch whether the client reads the end of its answer, also if the connection then ends."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_unread()

    def on_message_complete(self) -> None:
        """Stop waiting: the request is complete."""
        if self._http1_parser.skips:
            return
        self._reading = _Reading.NOTHING
        self._message_bytes = 0
        self._stop_reading_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        super()._start_asgi_task(cycle, until_closed(app, cycle) if cycle.scope["http_version"] == "1.0" else app)  # type: ignore[arg-type]

    # --- reading ---

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > self.bounds.head_bytes:
            self._refuse_head()
            raise ValueError("the headers are too long")  # the parser stops, and uvicorn calls `send_400_response`

    def _refuse_head(self) -> None:
        message = f"the request line and the headers must have at most {self.bounds.head_bytes} bytes"
        self._refusal = ErrorResponse(431, message, "invalid_request_error", code="headers_too_large")

    def _has_much_framing(self) -> bool:
        """Whether sizes of chunks and trailers take far more bytes than the body itself."""
        return self._message_bytes - self._body_bytes > self.bounds.head_bytes + 8 * self._body_bytes

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _read(self, reading: _Reading) -> None:
        self._stop_reading_timer()
        self._reading = reading
        seconds = self.bounds.head_seconds if reading is _Reading.HEAD else self.bounds.body_seconds
        self._read_timer = self.loop.call_later(seconds, self._reading_is_late)

    def _reading_is_late(self) -> None:
        self._read_timer = None
        if self.transport.is_closing():
            return
        is_second = self._reading is _Reading.HEAD and not self._is_idle()
        if is_second or self.flow.read_paused:  # the client waits for this server
            self._read(self._reading)
        elif self._reading is _Reading.HEAD and not self._message_bytes:
            self.transport.close()
        elif self._reading is _Reading.BODY and self.cycle.response_started:
            self.transport.abort()
        else:
            what = "headers" if self._reading is _Reading.HEAD else "body"
            message = f"the {what} did not arrive in time"
            self._refusal = ErrorResponse(408, message, "invalid_request_error", code="request_timeout")
            self.send_400_response("")

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuse a request whose head cannot be parsed, is too long or late, in the form of OpenAI's errors."""
        refusal = self._refusal or ErrorResponse(400, msg, "invalid_request_error", code="invalid_http")
        self._refusal = refusal
        self._stop_reading_timer()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # the bytes of two answers must not mix
            return
        body = refusal.body(self.scope.get("path", "") if self.scope else "")
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[refusal.status] + head + body)
        # Bytes that arrive after a close would reset the connection, and the client would not see the refusal.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._read_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    # --- writing ---

    def pause_writing(self) -> None:
        """Begin to watch whether the client reads its answer."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """Stop watching: the client has read enough, unless it is the end of its answer that waits."""
        if not (self._is_idle() and self.transport.get_write_buffer_size()):
            self._stop_writing_timer()
        super().resume_writing()

    def _watch_unread(self) -> None:
        self._stop_writing_timer()
        self._unread = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.bounds.unread_seconds, self._look_at_unread)

    def _look_at_unread(self) -> None:
        self._write_timer = None
        unread = self.transport.get_write_buffer_size()
        if unread and self._unread - unread < self.bounds.least_read_bytes:
            self.transport.abort()
        elif unread:
            self._watch_unread()

    def _stop_writing_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
