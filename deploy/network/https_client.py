"""What commands that call the HTTP API of a server have in common: its address, its certificate, why it is silent."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

import httpx
import typer

from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.errors import ConfigurationError, WorkerUnavailable
from cluster.wire.tls import client_context
from deploy.network.exposure import is_loopback

UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="The HTTP API of a running server, such as http://host:8000.")
]
CacertOption = Annotated[
    str | None,
    typer.Option(
        "--cacert",
        metavar="FILE",
        help="PEM file of certificates by which an https server is checked. Unset: server.tls.ca, or the system's.",
    ),
]

NO_API = "is it the address of an OpenAI-compatible server?"
"""What to ask about a server whose answers have another form."""
JSON_HEADERS = {"content-type": "application/json"}
"""The headers of a request whose body is `to_json`."""
TEMPORARY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE)
"""Statuses after which the same request may be answered later."""

LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause before a refused request is sent again, in seconds."""
_LONGEST_REASON = 200
_LONGEST_BODY = 500
_CONNECT_SECONDS = 10.0
"""Longest time until a server accepts a connection."""
_SHORT = httpx.Timeout(30.0, connect=_CONNECT_SECONDS)
"""Longest times of a question for which a server computes nothing."""


def server_root(url: str, option: str = "--url") -> str:
    """Return the address of a server without `/v1` and without a slash at its end.

    Raises `ConfigurationError`, which names the option.
    """
    try:
        parts = httpx.URL(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.host)
    except httpx.InvalidURL:
        is_address = False
    if not is_address:
        raise ConfigurationError(f"{option}: needed http://HOST:PORT or https://HOST:PORT, found {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def open_client(
    url: str,
    api_key: str | None,
    verify: ssl.SSLContext,
    timeout_seconds: float,
    option: str = "--url",
    *,
    is_own: bool = False,
) -> httpx.AsyncClient:
    """Return a client of the server at `url`, with or without `/v1`, that presents the API key with every request.

    It opens as many connections as its user has requests in flight. `verify` comes from `verification`. A server that
    `is_own`, or has a loopback address, is on this machine: a proxy that the environment names cannot reach it. Raises
    `ConfigurationError` for what is no address; it names the option. It also does for a key that no header can hold.
    """
    root = server_root(url, option)
    if api_key is not None and not all("!" <= character <= "~" for character in api_key):
        raise ConfigurationError("PILOTFISH_API_KEY: needed an API key of printable ASCII characters without spaces")
    try:
        return httpx.AsyncClient(
            base_url=root,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, _CONNECT_SECONDS)),
            verify=verify,
            trust_env=not (is_own or is_loopback(httpx.URL(root).host)),
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:  # the environment is all that is not checked yet
        raise ConfigurationError(
            "http_proxy, https_proxy, all_proxy, no_proxy: needed proxies that can be used, as http://HOST:PORT, found "
            f"others: {error}"
        ) from None


def verification(tls: PublicTlsSection | None, cacert: str | None = None, *, is_own: bool = False) -> ssl.SSLContext:
    """Return the TLS of a client: what it trusts, `cacert` above all, and the certificate that it presents.

    The server's name is checked, unless the server `is_own`: then it listens at an address of this machine. Raises
    `ConfigurationError`.
    """
    tls = tls or PublicTlsSection()
    if cacert is not None:
        tls = tls.model_copy(update={"ca": cacert})
    try:
        return client_context(tls, checks_name=not is_own)
    except ConfigurationError as error:
        if cacert is None:
            raise
        raise ConfigurationError(str(error).replace("server.tls.ca:", "--cacert:")) from None


def why_silent(error: httpx.HTTPError) -> str:
    """Return why a server gave no answer that can be read, and what to do, in one line. Reads the chain of causes."""
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not trusted ({cause.reason}: {cause.verify_message}); "
                "name the certificates that signed it with --cacert"
            )
    texts = " ".join(str(cause) for cause in causes)
    if "WRONG_VERSION_NUMBER" in texts or "RECORD_LAYER" in texts:
        return "it does not speak TLS; use http:// instead of https://"
    if any(isinstance(cause, ssl.SSLError) for cause in causes) or "alert" in texts:
        return f"TLS failed ({texts[:_LONGEST_REASON]}); see server.tls.client_certificate if it demands certificates"
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return "its name is unknown; check the host in --url"
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return "the connection is refused, nothing listens there; start `pilotfish serve` or check --url"
    if isinstance(error, httpx.TimeoutException):
        return "it does not answer in time"
    if isinstance(error, httpx.ReadError | httpx.RemoteProtocolError):
        return "it closed the connection; does it expect https:// instead of http://?"
    return str(error) or type(error).__name__


def refusal_text(response: httpx.Response) -> str:
    """Return what a server says in a refusal, in one line: its message in OpenAI's form, or else how the body begins.

    The body must have been read.
    """
    text: object = response.text[:_LONGEST_BODY]
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        text = response.json()["error"]["message"]
    return " ".join(str(text).split())


def retry_after(response: httpx.Response) -> float:
    """Return the seconds for which a refusal asks to wait, 60 at most; 0 if it names no number of seconds."""
    try:
        return min(LONGEST_PAUSE_SECONDS, max(0.0, float(response.headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0


def refusal_hint(status: int) -> str:
    """Return what to do about a status that refuses a caller, or nothing for another one."""
    if status == httpx.codes.UNAUTHORIZED:
        return "; set PILOTFISH_API_KEY to a key of the server"
    if status == httpx.codes.FORBIDDEN:
        return "; set PILOTFISH_API_KEY to the key of an operator"
    return ""


def to_json(value: object) -> bytes:
    """Return a value as JSON in UTF-8, for the body of a request.

    It holds all that Python reads from JSON, also half of a surrogate pair and NaN. Servers refuse these with a
    message, where `httpx` raises `ValueError`.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream of events as they arrive, without their ends. LF, CRLF or CR ends one.

    `httpx` also ends lines at other characters, such as U+2028, which a text in JSON may hold. Raises
    `httpx.HTTPError`.
    """
    rest, ended_in_cr = b"", False
    async for part in response.aiter_bytes():
        if ended_in_cr:
            part = part.removeprefix(b"\n")
        ended_in_cr = part.endswith(b"\r")
        *lines, last = part.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            yield (rest + line).decode(errors="replace")
            rest = b""
        rest += last
    if rest:
        yield rest.decode(errors="replace")


def json_of(response: httpx.Response) -> Any:
    """Return the JSON of an answer. Raises `WorkerUnavailable` for an answer in another form."""
    try:
        return response.json()
    except ValueError:
        raise WorkerUnavailable(f"{response.request.url} answered without JSON; {NO_API}") from None


async def ask(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """Return the answer to a `GET` for which a server computes nothing, so that it is due within half a minute.

    Raises `WorkerUnavailable` if there is none.
    """
    try:
        return await client.get(path, timeout=_SHORT)
    except httpx.HTTPError as error:
        raise WorkerUnavailable(f"{client.base_url}: {why_silent(error)}") from None


async def check_reachable(client: httpx.AsyncClient) -> None:
    """Ask an OpenAI-compatible server for its models, once, before long work.

    Raises `WorkerUnavailable` if nothing answers, if the server refuses the caller, and if it is no such server.
    """
    response = await ask(client, "/v1/models")
    if hint := refusal_hint(response.status_code):
        raise WorkerUnavailable(f"{client.base_url} answered {response.status_code}{hint}")
    if response.is_success:
        json_of(response)


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what caused it, with the members of groups."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop(0)
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return found
