"""Cross-origin resource sharing (CORS): the web origins whose pages may call the HTTP API from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

_EXPOSED = ("retry-after", "x-ignored-fields", "x-request-id")
_PREFLIGHT_SECONDS = 600


def cors(origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware that lets pages of these origins call; without origins, none.

    It comes before the one that demands API keys, because browsers ask without a key first. Cookies are not allowed:
    a page sends its key in a header.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=list(_EXPOSED),
            max_age=_PREFLIGHT_SECONDS,
        )
    ]
