"""What web pages in browsers may do with the HTTP API: hosts, origins and cross-origin resource sharing (CORS)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.core.errors import PermissionDenied, shorten
from cluster.ingress.access.http_access import OPEN_PATHS, route_path
from cluster.ingress.observability.http_middleware import note_error
from cluster.ingress.openai.errors import error_response

_EXPOSED = ("retry-after", "x-ignored-fields", "x-misspelt-fields", "x-request-id")
_PREFLIGHT_SECONDS = 600
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@\s]+))(?::(\d*))?")
_PORTS = {"http": "80", "https": "443"}
_ALL = "*"


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """The origins of pages that may call this server, and the host names under which they may call it."""

    origins: tuple[str, ...] = ()
    """Origins of further pages that may call, as `https://chat.example.com`, or `*` for all."""
    hosts: tuple[str, ...] = ()
    """Further names of this server, as `pilotfish.example.com`, `*.example.com`, or `*` for all."""

    def cors(self) -> list[Middleware]:
        """Return the middleware that lets pages of the origins call; without origins, none.

        It comes before the one that demands API keys, because browsers ask without a key first. Cookies are not
        allowed: a page sends its key in a header.
        """
        if not self.origins:
            return []
        return [
            Middleware(
                CORSMiddleware,
                allow_origins=list(self.origins),
                allow_methods=["GET", "HEAD", "POST"],
                allow_headers=["*"],
                expose_headers=list(_EXPOSED),
                max_age=_PREFLIGHT_SECONDS,
            )
        ]

    def check(self, scope: Scope) -> None:
        """Refuse a request that a browser sends for a foreign page, or to a foreign name. Raises `PermissionDenied`."""
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if not (len(hosts) <= 1 and all(self._is_own(host, scope) for host in hosts)):
            shown = shorten(", ".join(hosts))
            raise PermissionDenied(
                f"the host {shown} is no name of this server; server.allowed_hosts has further names"
            )
        if headers.get("sec-fetch-site") == "same-origin":
            return  # no page can set it, and a proxy in front may have changed the host
        if not (len(origins) <= 1 and all(self._may_call(origin, hosts) for origin in origins)):
            shown = shorten(", ".join(origins))
            raise PermissionDenied(f"pages of {shown} may not call; server.cors_origins has the origins that may")

    def _is_own(self, header: str, scope: Scope) -> bool:
        name, _ = _split_host(header)
        address = str((scope.get("server") or ("",))[0]).lower()
        if name in ("localhost", address) or name.endswith(".localhost") or _is_this_machine(name):
            return bool(name)
        if name.isascii() and name and "." not in name and not _is_address(name):
            return True  # a name of the local network or of Compose: no public server of names answers for it
        if _is_address(name) and _is_address(address) and not _is_loopback(address):
            return True  # the address of a machine or a load balancer in front; no name that an attacker controls
        return any(
            entry in (_ALL, name) or (entry.startswith("*.") and name.endswith(entry[1:]))
            for entry in (host.lower() for host in self.hosts)
        )

    def _may_call(self, origin: str, hosts: list[str]) -> bool:
        if _ALL in self.origins or origin in self.origins:
            return True
        scheme, _, rest = origin.partition("://")
        default = _PORTS.get(scheme, "")
        same = [(name, port or default) for name, port in map(_split_host, (rest, *hosts)) if name]
        return len(same) == 2 and same[0] == same[1]


OWN_PAGES = BrowserRules()
"""Pages of this server alone, under its addresses."""


class BrowserMiddleware:
    """Refuses requests of browsers for foreign pages and foreign names, unless API keys are demanded.

    A page of another site can send a request to a server on the same machine or network, and after DNS rebinding (its
    name then means this server's address) it can read the answer, too. Where keys are demanded it gets nothing without
    one, so any host is served there. Probes are served under any name.
    """

    def __init__(self, app: ASGIApp, rules: BrowserRules, demands_keys: Callable[[], bool]) -> None:
        self._app = app
        self._rules = rules
        self._demands_keys = demands_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app, or refuse the request with status 403."""
        if scope["type"] == "http" and not self._demands_keys() and route_path(scope) not in OPEN_PATHS:
            try:
                self._rules.check(scope)
            except PermissionDenied as error:
                note_error(scope, error)
                await error_response(error).response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _split_host(header: str) -> tuple[str, str]:
    """Return name and port of a host, in lower case; an empty name if it is malformed."""
    found = _HOST.fullmatch(header.strip())
    if found is None:
        return "", ""
    return (found.group(1) or found.group(2)).lower().rstrip("."), found.group(3) or ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _is_address(name: str) -> bool:
    return _address(name) is not None


def _is_loopback(name: str) -> bool:
    found = _address(name)
    return found is not None and found.is_loopback


def _is_this_machine(name: str) -> bool:
    """Whether a name is an address that means the caller's own machine, as `127.0.0.1` and `0.0.0.0` do."""
    found = _address(name)
    return found is not None and (found.is_loopback or found.is_unspecified)
