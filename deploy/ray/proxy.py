"""What Ray Serve's HTTP proxy does for Pilotfish: bounds of connections, TLS, pacing, and request ids that are UTF-8.

The proxy takes headers of any size, waits for clients for ever, demands no certificate of clients even if it has
certificates to check them by, sends on all requests of a flood side by side, so that none comes through soon, and fails
with status 500 for an `x-request-id` that is not UTF-8, before it calls the ingress. Serve calls `middlewares` in every
proxy process, before it listens, when the variable
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names it.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from uvicorn.config import HTTP_PROTOCOLS

from cluster.ingress.asgi import RequestIdMiddleware
from cluster.ingress.connections.pacing import PacingMiddleware
from workers.serve.logs import forward_warnings

_PROTOCOL = "cluster.ingress.connections.protocol:BoundedHttpProtocol"


def middlewares() -> list[Middleware]:
    """Bound the connections of the HTTP servers of this process, and return the middlewares around the proxy.

    The warnings of this process go to `serve`, if that collects them.
    """
    forward_warnings("proxy")
    HTTP_PROTOCOLS["auto"] = _PROTOCOL
    return [Middleware(RequestIdMiddleware), Middleware(PacingMiddleware)]
