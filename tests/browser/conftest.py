"""A cluster with the packaged model in this process, whose drafter can be killed, and a browser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser

from deploy.local.local_cluster import LocalCluster
from deploy.models import resolve_models
from deploy.settings import load_settings
from tests.support.browser import chromium, chromium_path

SETTINGS = (
    "draft.placement=drafter",
    "draft.controller=off",
    "server.demo=on",
    "server.http_port=0",
    "server.grpc_port=0",
    "target.threads=1",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, help="Directory for pictures of the page.")


@pytest.fixture
def screenshots(request: pytest.FixtureRequest) -> Path | None:
    """The directory for pictures, if there is one."""
    directory: Path | None = request.config.getoption("--screenshots")
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """The URL of the page of a running cluster."""
    chromium_path()  # skip before the model is loaded
    settings = load_settings(assignments=SETTINGS, environment={})
    models = resolve_models(settings.configuration, load_settings().cache_directory, lambda _: None)
    async with LocalCluster(models.configuration, http=True) as cluster:
        yield f"{cluster.http_url}/"


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as found:
        yield found


class Forwarder:
    """A port that passes connections on to a server, until it is cut: then connections break and none is accepted."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    async def open(self) -> None:
        """Accept connections, always at the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Break all connections and refuse new ones."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, back = await asyncio.open_connection(*self._target)
            self._writers |= {writer, back}
            await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))
            self._writers -= {writer, back}


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def forwarded(url: str) -> AsyncIterator[Forwarder]:
    """A way to the server that a test can cut."""
    found = Forwarder(url)
    await found.open()
    try:
        yield found
    finally:
        await found.cut()
