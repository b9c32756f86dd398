"""Commands talk to a server with TLS: they check its certificate by `--cacert` or the settings, and present theirs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import ConfigurationError, WorkerUnavailable
from cluster.ingress.http import create_app
from deploy.batch.run import BatchRun
from deploy.commands.client.connection import ChosenServer, connected, get, server_client, stream
from deploy.settings import load_settings
from tests.support.certificates import Authority
from tests.support.fakes.fake_engine import listening
from tests.support.fakes.http_app import HI, HttpApi


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@asynccontextmanager
async def https_server(directory: Path, authority: Authority, *, demands: bool = False) -> AsyncIterator[str]:
    certificate, key = authority.issue("server")
    ca = str(authority.file) if demands else None
    api = HttpApi(directory / "model")
    tls = PublicTlsSection(certificate=certificate, key=key, client_ca=ca)
    async with api.http, listening(create_app(api.client, LimitsSection()), tls) as url:
        assert url.startswith("https://")
        yield url


async def models(url: str, cacert: str | None = None, *assignments: str) -> int:
    settings = load_settings(None, assignments, environment={})
    async with connected(ChosenServer(settings, url, cacert=cacert), print) as client:
        return len((await get(client, "/v1/models"))["data"])


async def test_chat_and_complete_check_the_server_by_cacert_or_the_settings(
    tmp_path: Path, authority: Authority
) -> None:
    ca = str(authority.file)
    async with https_server(tmp_path, authority) as url:
        assert await models(url, ca) == 1
        assert await models(url, None, f"server.tls.ca={ca}") == 1
        with pytest.raises(WorkerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await models(url)
        with pytest.raises(WorkerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await models(url, str(Authority(tmp_path / "another").file), f"server.tls.ca={ca}")
        with pytest.raises(ConfigurationError, match="nothing-here"):
            await models(url, str(tmp_path / "nothing-here"))
        async with connected(ChosenServer(load_settings(environment={}), url, cacert=ca), print) as client:
            chunks = [chunk async for chunk in stream(client, "/v1/chat/completions", {"messages": HI, "stream": True})]
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks if one["choices"])


async def test_a_certificate_is_presented_to_a_server_that_demands_one(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("client")
    pair = (f"server.tls.client_certificate={certificate}", f"server.tls.client_key={key}")
    async with https_server(tmp_path, authority, demands=True) as url:
        assert await models(url, str(authority.file), *pair) == 1
        with pytest.raises(WorkerUnavailable):
            await models(url, str(authority.file))


async def test_batches_and_benchmarks_do_the_same(tmp_path: Path, authority: Authority) -> None:
    ca, source, out = str(authority.file), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": HI, "max_tokens": 8}
    source.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}))
    async with https_server(tmp_path, authority) as url:
        settings = load_settings(environment={})
        async with server_client(settings, url, ca) as client:
            counts = await BatchRun(client, 1, 30.0, lambda *_: None).run(source, out)
        assert (counts.answered, counts.failed) == (1, 0)
        trusting = load_settings(None, [f"server.tls.ca={ca}"], environment={})
        async with server_client(trusting, url) as client:
            assert (await client.get("/v1/models")).status_code == 200
        async with server_client(settings, url) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("/v1/models")
