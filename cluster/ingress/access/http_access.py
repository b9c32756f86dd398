"""API keys over HTTP: a middleware that refuses callers without a key, and the name of the caller for requests."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.core.errors import PermissionDenied, PilotfishError, Unauthenticated
from cluster.ingress.access.api_keys import ApiKey
from cluster.ingress.access.key_ring import KeyRing, bearer_key
from cluster.ingress.observability.http_middleware import note_client, note_error
from cluster.ingress.openai.errors import error_response
from pilotfish.v1 import generation_pb2

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
"""Routes for probes, which have no key."""
PAGE_PATH, PAGE_FILES = "/", "/page/"
"""The page, into which its user types a key, and the beginning of the paths of its files."""
ADMIN_PATHS = frozenset({"/metrics", "/cluster", "/demo/kill-drafter"})
"""Routes for operators."""

_caller: ContextVar[ApiKey | None] = ContextVar("caller", default=None)


class AccessMiddleware:
    """Demands an API key of every request except probes and the files of the page, before its body is read.

    A key comes as `Authorization: Bearer KEY`, or as `x-api-key: KEY`. A caller without one gets status 401, and a
    client that asks for what belongs to operators gets 403.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, *, has_page: bool = False) -> None:
        self._app = app
        self._keys = keys
        self._has_page = has_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app if the caller may call it."""
        if scope["type"] != "http" or not self._keys.demands_keys or self._is_open(route_path(scope)):
            await self._app(scope, receive, send)
            return
        try:
            key = self._identify(scope)
        except PilotfishError as error:
            note_error(scope, error)
            await error_response(error).response(scope)(scope, receive, send)
            return
        if not key.is_internal:
            note_client(scope, key.name)
        token = _caller.set(key)
        try:
            await self._app(scope, receive, send)
        finally:
            _caller.reset(token)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or (self._has_page and (path == PAGE_PATH or path.startswith(PAGE_FILES)))

    def _identify(self, scope: Scope) -> ApiKey:
        """Return the caller's key. Raises `Unauthenticated`, `PermissionDenied`."""
        headers = Headers(scope=scope)
        bearers, bare = headers.getlist("authorization"), headers.getlist("x-api-key")
        if len(bearers) > 1 or len(bare) > 1:
            raise Unauthenticated("one API key is needed: the request has several")
        key = self._keys.identify(bare[0] if bare and not bearers else bearer_key(*bearers))
        if route_path(scope) in ADMIN_PATHS and not key.is_admin:
            raise PermissionDenied("the API key does not allow this: it needs the key of an operator")
        return key


def named(request: generation_pb2.GenerateRequest) -> generation_pb2.GenerateRequest:
    """Write the current HTTP request's caller into a request to the generation service, and return it.

    That is the name of the key, and whether drafters may learn from its texts.
    """
    key = _caller.get()
    if key is not None and not key.is_internal:
        request.client = key.name
        request.client_allows_learning = key.allows_learning
    return request


def route_path(scope: Scope) -> str:
    """Return the path that the app's routes see: without the prefix at which a proxy serves the app."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    if prefix and path == prefix:
        return "/"
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path
