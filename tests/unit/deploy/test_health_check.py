"""The image's HEALTHCHECK: it finds a server alive over HTTP, over TLS and with certificates of clients."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from deploy.network.health_check import is_alive
from tests.support.certificates import Authority
from workers.serve.node import free_port

LOOPBACK = "127.0.0.1"


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


class Failing(Health):
    status = 503


@contextmanager
def serving(handler: type[Health], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Inside, a server runs on the port that is given."""
    with ThreadingHTTPServer((LOOPBACK, 0), handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def tls(directory: Path) -> tuple[ssl.SSLContext, Authority]:
    authority = Authority(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("pilotfish"))
    return context, authority


def test_a_server_is_alive_over_http_and_over_tls(tmp_path: Path) -> None:
    with serving(Health) as port:
        assert is_alive(port)
    with serving(Health, tls(tmp_path)[0]) as port:
        assert is_alive(port)


def test_a_server_that_demands_certificates_of_clients_is_alive(tmp_path: Path) -> None:
    context, authority = tls(tmp_path)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.file)
    with serving(Health, context) as port:
        assert is_alive(port)


def test_a_server_that_fails_or_is_gone_is_not_alive(tmp_path: Path) -> None:
    with serving(Failing) as port:
        assert not is_alive(port)
    with serving(Failing, tls(tmp_path)[0]) as port:
        assert not is_alive(port)
    assert not is_alive(free_port(LOOPBACK))
