"""A middleware for the HTTP proxy of Ray Serve that rejects request ids that are not UTF-8.

The proxy fails with status 500 for an `x-request-id` that is not UTF-8, before it calls the ingress. Serve calls
`middlewares` in every proxy process when `CALLBACK_VARIABLE` names it.
"""

from __future__ import annotations

from starlette.middleware import Middleware

from cluster.ingress.asgi import RequestIdMiddleware

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "deploy.ray.proxy:middlewares"


def middlewares() -> list[Middleware]:
    """Return the middlewares that Serve installs around the proxy."""
    return [Middleware(RequestIdMiddleware)]
