"""The page at `/`: a chat that shows how drafts and target work together. Static files and their data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from importlib import resources

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cluster.core.errors import InvalidRequest, NotReady

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""The files that are served, by ending, and their content types."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
KillDrafter = Callable[[], Awaitable[bool]]
"""Kills one drafter. Returns whether there was one."""


@dataclass(frozen=True, slots=True)
class Page:
    """What the page can do."""

    grpc_port: int
    """Port of the gRPC API, for examples."""
    kill_drafter: KillDrafter | None = None
    """For demonstrations only; `None` where nobody may kill drafters."""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    content_type: str
    tag: str


def add_page(app: FastAPI, page: Page, demands_keys: Callable[[], bool]) -> None:
    """Add the routes of the page. `demands_keys` says whether callers of the API need a key."""
    files = _read_files()

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return _served(files["index.html"], request)

    @app.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name == "settings.json":
            settings = {
                "demands_key": demands_keys(),
                "grpc_port": page.grpc_port,
                "can_kill_drafter": page.kill_drafter is not None,
            }
            return JSONResponse(settings, headers=_HEADERS)
        if name not in files:
            raise HTTPException(404)
        return _served(files[name], request)

    kill_drafter = page.kill_drafter
    if kill_drafter is None:
        return

    @app.post("/demo/kill-drafter", include_in_schema=False)
    async def kill(request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        if content_type != "application/json":  # a browser sends it only for pages of this server
            raise InvalidRequest("content-type", content_type, "application/json")
        if not await kill_drafter():
            raise NotReady("no drafter runs in a process of its own")
        return JSONResponse({"killed": 1})


def _served(file: _File, request: Request) -> Response:
    headers = {**_HEADERS, "etag": file.tag, "content-type": file.content_type}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers)


def _read_files() -> dict[str, _File]:
    """Return the files of the page by name."""
    found: dict[str, _File] = {}
    for entry in resources.files("cluster.ingress").joinpath("page").iterdir():
        content_type = _TYPES.get("." + entry.name.rpartition(".")[2])
        if content_type is not None:
            content = entry.read_bytes()
            found[entry.name] = _File(content, content_type, f'"{blake2b(content, digest_size=12).hexdigest()}"')
    return found
