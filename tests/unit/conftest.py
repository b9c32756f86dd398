"""What all unit tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import pytest

if TYPE_CHECKING:
    from tests.support.fakes.http_app import HttpApi


@pytest.fixture(scope="package", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HTTP clients trust one authority: reading all that are known takes 50 ms in every client that a test makes."""
    file = tmp_path_factory.mktemp("authority") / "ca.crt"
    first, end, _ = Path(certifi.where()).read_text("utf-8").partition("-----END CERTIFICATE-----")
    file.write_text(first + end, "utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture
async def api(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[HttpApi]:
    """The HTTP API of an engine that writes the `TEXT` of the test's module within its `CONTEXT`, if it has them."""
    from tests.support.fakes.http_app import HttpApi

    texts = [request.module.TEXT] if hasattr(request.module, "TEXT") else []
    api = HttpApi(tmp_path, *texts)
    api.engine.context = getattr(request.module, "CONTEXT", api.engine.context)
    async with api.http:
        yield api
