"""`python -m deploy.network.health_check`: exit with status 0 if the HTTP API on this machine is alive.

The image's HEALTHCHECK. It speaks HTTP, and TLS where the server does not answer that. It sends nothing secret and
stays on its own machine, so the server's certificate is not verified.
"""

from __future__ import annotations

import http.client
import ssl
import sys

_ADDRESS = "127.0.0.1"
_PORT = 8000
_TIMEOUT_SECONDS = 2.0


def is_alive(port: int) -> bool:
    """Whether the server answers `/health` with 200, over HTTP or TLS.

    A server that demands certificates of clients is alive if it shakes hands and then ends the connection.
    """
    try:
        return _answers(http.client.HTTPConnection(_ADDRESS, port, timeout=_TIMEOUT_SECONDS))
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        pass  # it may speak TLS
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # here a client is refused after the handshake
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = http.client.HTTPSConnection(_ADDRESS, port, timeout=_TIMEOUT_SECONDS, context=context)
    try:
        connection.connect()
    except OSError:
        return False
    try:
        return _answers(connection)
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException):
        return True


def _answers(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not is_alive(_PORT))
