"""The HTTP API that a command talks to: a running server, or a cluster in this process."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer

from cluster.core.config.sections import Configuration
from cluster.core.errors import (
    ConfigurationError,
    InvalidRequest,
    NotReady,
    TooLarge,
    UnknownModel,
    WorkerUnavailable,
)
from cluster.wire.address import http_api_url, reachable_host
from deploy.network.https_client import (
    JSON_HEADERS,
    NO_API,
    TEMPORARY,
    ask,
    json_of,
    lines_of,
    open_client,
    refusal_hint,
    refusal_text,
    retry_after,
    to_json,
    verification,
    why_silent,
)
from deploy.settings import Settings, load_settings

InProcessOption = Annotated[
    bool, typer.Option("--in-process", help="Load the models in this process, without Ray and without a server.")
]

_CONNECT_SECONDS = 0.5
"""How long to wait for the configured server to accept a connection."""
_RETRY_SECONDS = 0.5
_MOST_RETRIES = 60
"""Attempts in a row to continue a stream that broke off."""
_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class ChosenServer:
    """Which server a command talks to: the one at `url`, the configured one, or a cluster in this process.

    Without `url` or `in_process`, the configured server answers if it listens, otherwise this process. An https server
    is checked by the certificates in the file `cacert`, else by those in the settings.
    """

    settings: Settings
    url: str | None = None
    in_process: bool = False
    cacert: str | None = None


def client_settings(config: str | None, assignments: Iterable[str], url: str | None, in_process: bool) -> Settings:
    """Settings of a command that asks a server, as `ChosenServer` chooses it. Raises the errors of `load_settings`.

    The draft that `draft.path` names is looked for, and fetched, only if the command loads the models itself.
    """
    assignments = tuple(assignments)
    if url is None and in_process:
        return load_settings(config, assignments)
    settings = load_settings(config, assignments, is_client=True)
    has_server = url is not None or listening_url(settings.configuration) is not None
    return settings if has_server else load_settings(config, assignments)


@asynccontextmanager
async def connected(
    server: ChosenServer, notice: Callable[[str], None], timeout_seconds: float | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the chosen server. Without `timeout_seconds`, it waits as long as the settings allow.

    Raises `ConfigurationError` and the errors of loading a model.
    """
    settings, url = server.settings, server.url
    if url is not None and server.in_process:
        raise ConfigurationError("--url and --in-process: needed one of them, found both")
    if url is not None or not (server.in_process or listening_url(settings.configuration) is None):
        async with server_client(settings, url, server.cacert, timeout_seconds) as client:
            yield client
        return
    if not server.in_process:
        notice("no server is running; loading the model in this process (`pilotfish serve` starts a server)")
    # Importing torch takes seconds, and a client of a running server does not need it.
    from deploy.local.local_cluster import LocalCluster
    from deploy.models import resolve_models

    models = resolve_models(settings.configuration, settings.cache_directory, lambda _: None)
    any_port = models.configuration.server.model_copy(update={"http_port": 0, "grpc_port": 0})
    configuration = models.configuration.model_copy(update={"server": any_port})
    verify = verification(configuration.server.tls, is_own=True)
    timeout = configuration.limits.max_timeout_seconds if timeout_seconds is None else timeout_seconds
    async with (
        LocalCluster(configuration, http=True) as cluster,
        open_client(cluster.http_url, cluster.access.api_key, verify, timeout, is_own=True) as client,
    ):
        yield client


def server_client(
    settings: Settings,
    url: str | None,
    cacert: str | None = None,
    timeout_seconds: float | None = None,
    option: str = "--url",
) -> httpx.AsyncClient:
    """Return a client of the server at `url`, or of the configured one, with the API key of the settings.

    An https server is checked by the certificates in `cacert`, else by those in the settings. The name in the
    certificate of the configured server is not checked without `cacert`: it listens at an address of this machine.
    Without `timeout_seconds`, an answer may take as long as the settings allow. Raises `ConfigurationError` for what is
    no address; it names the option.
    """
    configuration = settings.configuration
    verify = verification(configuration.server.tls, cacert, is_own=url is None and cacert is None)
    longest = configuration.limits.max_timeout_seconds if timeout_seconds is None else timeout_seconds
    address = http_api_url(configuration.server) if url is None else url
    return open_client(address, settings.api_key, verify, longest, option, is_own=url is None)


def listening_url(configuration: Configuration) -> str | None:
    """The configured URL if its port accepts connections, otherwise `None`."""
    server = configuration.server
    try:
        address = (reachable_host(server.http_host), server.http_port)
        with socket.create_connection(address, timeout=_CONNECT_SECONDS):
            return http_api_url(server)
    except (OSError, UnicodeError):  # the latter for what is no name of a host
        return None


async def post(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Any:
    """Return the JSON of an answer. Raises `WorkerUnavailable`, `NotReady`, `ConfigurationError` for a refused body."""
    try:
        response = await client.post(path, content=to_json(body), headers=JSON_HEADERS)
    except httpx.HTTPError as error:
        raise WorkerUnavailable(f"{client.base_url}: {why_silent(error)}") from None
    return json_of(_checked(response))


async def get(client: httpx.AsyncClient, path: str) -> Any:
    """Return the JSON of a route for which a server computes nothing. Raises `WorkerUnavailable`, `NotReady`."""
    return json_of(_checked(await ask(client, path)))


async def stream(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
    """Yield the chunks of a streamed answer. A stream that breaks off continues after its last event.

    Raises `WorkerUnavailable`, `NotReady`, and `ConfigurationError` for a body that the server refuses.
    """
    last, attempts, content = "", 0, to_json(body)
    while True:
        headers = JSON_HEADERS | ({"Last-Event-ID": last} if last else {})
        try:
            async with client.stream("POST", path, content=content, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    _checked(response)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise WorkerUnavailable(f"{response.request.url} answered without events; {NO_API}")
                async for line in lines_of(response):
                    name, _, value = line.partition(":")
                    value = value.removeprefix(" ")
                    if name == "id":
                        last, attempts = value, 0
                    elif name == "data" and value == _DONE:
                        return
                    elif name == "data":
                        yield _chunk(value)
            reason = "the stream ended before the answer was complete"
        except httpx.HTTPError as error:
            reason = why_silent(error)
        except NotReady as error:
            reason = str(error)
        attempts += 1
        if not last or attempts > _MOST_RETRIES:
            raise WorkerUnavailable(f"{client.base_url}: {reason}")
        await asyncio.sleep(_RETRY_SECONDS)


def _checked(response: httpx.Response) -> httpx.Response:
    """Raise the error of a refused request: `ConfigurationError` if a later one cannot succeed, `NotReady` if it may.

    A `NotReady` has the seconds for which the server asks to wait.
    """
    if response.is_success:
        return response
    code = ""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        code = response.json()["error"]["code"]
    said, hint = refusal_text(response), refusal_hint(response.status_code)
    message = f"{response.request.url} answered {response.status_code}: {said}{hint}"
    if response.status_code in TEMPORARY:
        error = NotReady(message)
        error.retry_after_seconds = retry_after(response)
        raise error
    if response.status_code in (InvalidRequest.http_status, TooLarge.http_status) or code == UnknownModel.http_code:
        raise ConfigurationError(message)
    raise WorkerUnavailable(message)


def _chunk(data: str) -> Any:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        chunk = None
    error = chunk.get("error") if isinstance(chunk, dict) else None
    if error is not None:
        reason = error.get("message", error) if isinstance(error, dict) else error
        raise WorkerUnavailable(f"the server ended the answer with an error: {reason}")
    if not isinstance(chunk, dict) or "choices" not in chunk:
        raise WorkerUnavailable(f"the server sent what is no event; {NO_API}")
    return chunk
