"""A cluster with the packaged model in this process, whose drafter can be killed, and a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

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
