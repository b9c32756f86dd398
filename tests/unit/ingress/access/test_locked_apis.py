"""Both APIs on real sockets, locked with API keys."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.core.errors import PermissionDenied, Unauthenticated
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.key_ring import KeyRing
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from cluster.wire.peer_access import PublicAccess
from pilotfish.v1 import generation_pb2, operations_pb2
from tests.support.deadline import deadline
from tests.support.fakes.both_apis import HI, OWN_KEY, BothApis, Request, Sampling, serving
from tests.support.fakes.fake_engine import MODEL

ALICE, BOB, OPERATOR = "alice-key-0123456789", "bob-key-0123456789", "operator-key-0123456789"
TIMEOUT_SECONDS = 10.0
SERVICES = (*generation_pb2.DESCRIPTOR.services_by_name.values(), *operations_pb2.DESCRIPTOR.services_by_name.values())
METHODS = [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[BothApis]:
    keys = KeyRing(parse_keys(f"alice {ALICE}\nbob {BOB}\nops {OPERATOR} admin", "keys"), own_key=OWN_KEY)
    async with serving(tmp_path, keys) as both:
        yield both


def client_of(apis: BothApis, key: str | None) -> GenerationClient:
    return GenerationClient(fixed_address(apis.grpc_address), PublicAccess(key))


async def statuses(apis: BothApis, headers: dict[str, str]) -> dict[str, int]:
    """The status of a request without a body to every route of the application."""
    found = {}
    for path, operations in apis.app.openapi()["paths"].items():
        for method in operations:
            response = await apis.http.request(method, path.replace("{name}", MODEL), headers=headers)
            found[f"{method} {path}"] = response.status_code
    return found


async def test_every_http_route_but_health_needs_a_key(locked: BothApis) -> None:
    for headers in ({}, bearer("wrong-key-0123456789"), bearer(ALICE[:-1]), {"authorization": f"Basic {ALICE}"}):
        found = await statuses(locked, headers)
        open_routes = {"get /health", "head /health", "get /ping", "post /ping", "get /ready"}
        assert {route for route, status in found.items() if status != 401} == open_routes
    found = await statuses(locked, bearer(ALICE))
    assert 401 not in found.values()
    assert found["get /v1/models"] == 200
    for path in ("/unknown", "/docs", "/openapi.json", "/metrics/", "//health", "/health/../v1/models"):
        assert (await locked.http.get(path)).status_code == 401


async def test_a_refusal_has_openais_format_and_does_not_repeat_the_key(locked: BothApis) -> None:
    response = await locked.http.post("/v1/chat/completions", json={"messages": HI}, headers=bearer("x" * 100))
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert "xxx" not in response.text
    assert not locked.engine.requests


async def test_openais_client_knows_the_refusal_and_works_with_its_key(locked: BothApis) -> None:
    address = str(locked.http.base_url)
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as wrong:
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=ALICE, max_retries=0) as right:
        answer = await right.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "hello the world"


async def test_a_key_may_come_as_x_api_key_and_several_are_refused(locked: BothApis) -> None:
    assert (await locked.http.get("/v1/models", headers={"x-api-key": BOB})).status_code == 200
    assert (await locked.http.get("/v1/models", headers={"x-api-key": "wrong"})).status_code == 401
    both = [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {BOB}")]
    assert (await locked.http.get("/v1/models", headers=both)).status_code == 401


async def test_metrics_belong_to_operators(locked: BothApis) -> None:
    refused = await locked.http.get("/metrics", headers=bearer(ALICE))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    assert (await locked.http.get("/metrics", headers=bearer(OPERATOR))).status_code == 200
    client, operator = client_of(locked, ALICE), client_of(locked, OPERATOR)
    with pytest.raises(PermissionDenied, match="the key of an operator"):
        await client.metrics()
    assert b"answers_total" in (await operator.metrics())[0]
    await client.close()
    await operator.close()


@pytest.mark.parametrize("key", [None, "wrong-key-0123456789"], ids=["without a key", "with a wrong key"])
async def test_every_rpc_but_health_needs_a_key(locked: BothApis, key: str | None) -> None:
    metadata = PublicAccess(key).metadata()
    async with grpc.aio.insecure_channel(locked.grpc_address) as channel:
        for method in METHODS:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(method)(b"", timeout=TIMEOUT_SECONDS, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
        )
        with pytest.raises(grpc.aio.AioRpcError) as hidden:
            await anext(aiter(listing))
        assert hidden.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="pilotfish.v1.GenerationService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert not locked.engine.requests


async def test_a_grpc_client_presents_its_key(locked: BothApis) -> None:
    client, stranger = client_of(locked, ALICE), client_of(locked, None)
    text = "".join([one.delta.text async for one in client.generate(Request(text="hi"), TIMEOUT_SECONDS)])
    assert text == "hello the world"
    with pytest.raises(Unauthenticated, match="Authorization: Bearer KEY"):
        await anext(stranger.generate(Request(text="hi"), TIMEOUT_SECONDS))
    assert [request.client for request in locked.engine.requests] == ["alice"]
    await client.close()
    await stranger.close()


async def test_a_client_cannot_take_the_name_of_another(locked: BothApis) -> None:
    client = client_of(locked, BOB)
    request = Request(text="hi", client="alice")
    assert [one async for one in client.generate(request, TIMEOUT_SECONDS)]
    await locked.http.post("/v1/completions", json={"prompt": "hi"}, headers=bearer(BOB))
    assert [request.client for request in locked.engine.requests] == ["bob", "bob"]
    await client.close()


async def test_clients_may_use_the_same_request_id_and_abort_only_their_own(locked: BothApis) -> None:
    locked.engine.hold_after = 1
    request = Request(text="hi", request_id="same", sampling=Sampling(seed=1))
    alice, bob, operator = (client_of(locked, key) for key in (ALICE, BOB, OPERATOR))
    async with deadline(TIMEOUT_SECONDS):
        running = alice.generate(request, TIMEOUT_SECONDS)
        assert (await anext(running)).started.request_id == "same"
        assert not await bob.abort("same")
        assert not await bob.abort("same", "alice")
        other = bob.generate(request, TIMEOUT_SECONDS)
        await anext(other)
        # A resumed call ends the earlier call with its id, but not that of another client.
        resumed = Request(text="hi", request_id="same", sampling=Sampling(seed=1))
        resumed.resume.add(index=0)
        again = bob.generate(resumed, TIMEOUT_SECONDS)
        await anext(again)
        assert [one.WhichOneof("event") async for one in other][-1] == "finished"
        assert not await operator.abort("same")
        assert await operator.abort("same", "bob")
        assert await alice.abort("same")
        ends = [one async for one in running]
        assert ends[-1].finished.reason == generation_pb2.FINISH_REASON_ABORT
        assert [one async for one in again]
    for client in (alice, bob, operator):
        await client.close()


async def test_no_key_is_logged(locked: BothApis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = client_of(locked, ALICE)
    for headers in (bearer(ALICE), {"x-api-key": BOB}, bearer("wrong-key-0123456789")):
        await locked.http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
        await locked.http.post("/v1/completions", json={"prompt": 7}, headers=headers)
    assert [one async for one in client.generate(Request(text="hi"), TIMEOUT_SECONDS)]
    await client.close()
    for secret in (ALICE, BOB, OPERATOR, "wrong-key-0123456789", OWN_KEY):
        assert secret not in caplog.text
        assert secret not in repr(client_of(locked, secret)) and secret not in repr(PublicAccess(secret))


@pytest.mark.parametrize("key", [None, ALICE], ids=["without a key", "with a key"])
async def test_the_command_line_takes_its_key_from_the_environment(locked: BothApis, key: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PILOTFISH_API_KEY"}
    command = (sys.executable, "-m", "deploy.cli", "generate", "hi", "--max-tokens", "32")
    process = await asyncio.create_subprocess_exec(
        *command,
        "--url",
        str(locked.http.base_url),
        env=environment | ({} if key is None else {"PILOTFISH_API_KEY": key}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    written, notices = await process.communicate()
    if key is None:
        assert process.returncode != 0
        assert b"an API key is needed" in notices
        assert b"set PILOTFISH_API_KEY" in notices
    else:
        assert (process.returncode, written) == (0, b"hello the world\n"), notices
