"""Request ids: a response contains the client's own id once, and the service's id is unique."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from ray.serve._private.http_util import _apply_middlewares
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.ingress.http import create_app
from deploy.ray.proxy import middlewares
from tests.support.fakes.http_app import LIMITS, HttpApi, error_of

ID = "x-request-id"


@pytest.fixture
async def behind_serve(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The application behind the middlewares of Ray Serve's proxy, and behind its reading of the request's id."""
    app = create_app(HttpApi(tmp_path).client, LIMITS, adds_request_id=False)

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        dict(scope["headers"])[ID.encode()].decode()  # fails for bytes outside UTF-8, as Serve's proxy does
        await app(scope, receive, send)

    whole: ASGIApp = _apply_middlewares(proxy, middlewares())
    transport = httpx.ASGITransport(whole, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://pilotfish") as http:
        yield http


async def test_the_client_may_choose_the_id_of_a_request(api: HttpApi) -> None:
    named = await api.complete(request_id="my-1")
    assert named.json()["id"] == "cmpl-my-1"
    assert api.engine.requests[0].request_id == "my-1"
    response = await api.http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-request-id": "not valid"})
    assert response.headers["x-request-id"] != "not valid"
    assert api.engine.requests[1].request_id == response.headers["x-request-id"]
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"


async def test_concurrent_requests_may_have_the_same_client_id(api: HttpApi) -> None:
    headers = {"x-request-id": "my-1"}
    responses = await asyncio.gather(
        *(api.http.post("/v1/completions", json={"prompt": "hi"}, headers=headers) for _ in range(3))
    )
    assert [(response.status_code, response.headers["x-request-id"]) for response in responses] == [(200, "my-1")] * 3
    assert len({response.json()["id"] for response in responses}) == 3
    assert len({request.request_id for request in api.engine.requests}) == 3


NOT_ASCII = [b"\xff", "ÿ".encode(), "鱼".encode(), b"my-1\xe9"]


@pytest.mark.parametrize("header", NOT_ASCII)
async def test_an_id_outside_ascii_is_refused_by_name(api: HttpApi, header: bytes) -> None:
    response = await api.http.post("/v1/completions", json={"prompt": "hi"}, headers={ID: header})
    assert (response.status_code, error_of(response)["param"]) == (400, ID)
    assert len(response.headers.get_list(ID)) == 1
    assert not api.engine.requests
    assert (await api.complete()).status_code == 200


@pytest.mark.parametrize("header", NOT_ASCII)
async def test_an_id_outside_ascii_is_refused_behind_serves_proxy(
    behind_serve: httpx.AsyncClient, header: bytes
) -> None:
    response = await behind_serve.get("/v1/models", headers={ID: header})
    assert (response.status_code, error_of(response)["param"]) == (400, ID)
    assert len(response.headers.get_list(ID)) == 1


@pytest.mark.parametrize("headers", [{}, {ID: "my-1"}, {ID: "not valid"}])
async def test_one_id_comes_back_from_behind_serves_proxy(
    behind_serve: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    response = await behind_serve.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert response.status_code == 200
    assert len(response.headers.get_list(ID)) == 1
    assert (response.headers[ID] == headers.get(ID)) is (headers.get(ID) == "my-1")
