"""Limits of clients over both APIs, and web pages that may call the HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.core.config.load import load
from cluster.core.config.server import ClientLimitsSection
from cluster.core.errors import ConfigurationError, RateLimited
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.browsers import BrowserRules
from cluster.ingress.access.grpc_access import AccessInterceptor
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.access.public_client import PublicClient
from cluster.ingress.grpc import RoutedGenerationServicer
from cluster.ingress.http import create_app
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from cluster.wire.peer_access import PublicAccess
from cluster.wire.server import GENERATION_SERVICE, WireServer
from pilotfish.v1 import generation_pb2_grpc
from tests.support.fakes.both_apis import HI, LIMITS, OWN_KEY, Request, serving

ALICE, BOB = "alices-secret-key", "bobs-own-secret-key"
LINES = f"alice {ALICE} requests_per_minute=2\nbob {BOB}"


@asynccontextmanager
async def limited(directory: Path, defaults: ClientLimitsSection) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Both APIs of an ingress that limits its clients, in front of another server. Yields an HTTP client and the gRPC
    address."""
    keys = KeyRing(parse_keys(LINES, "test"), own_key=OWN_KEY)
    async with serving(directory) as both:
        client = PublicClient(both.client, lambda name: keys.limits_of(name) or defaults, clock=lambda: 0.0)
        async with WireServer("127.0.0.1", 0, interceptors=(AccessInterceptor(keys),)) as server:
            servicer = RoutedGenerationServicer(client, 10.0)
            server.add(GENERATION_SERVICE, generation_pb2_grpc.add_GenerationServiceServicer_to_server, servicer)
            port = await server.start()
            app = create_app(client, LIMITS, keys=keys, browsers=BrowserRules(("https://chat.example.com",)))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://pilotfish") as http:
                yield http, f"127.0.0.1:{port}"


async def over_grpc(address: str, key: str) -> None:
    async with GenerationClient(fixed_address(address), PublicAccess(key)) as client:
        async for _ in client.generate(Request(text="hi"), 5.0):
            pass


async def test_both_apis_count_the_requests_of_one_client_together(tmp_path: Path) -> None:
    async with limited(tmp_path, ClientLimitsSection()) as (http, address):
        alice, bob = ({"authorization": f"Bearer {key}"} for key in (ALICE, BOB))
        body = {"messages": HI}
        assert (await http.post("/v1/chat/completions", json=body, headers=alice)).status_code == 200
        await over_grpc(address, ALICE)
        refused = await http.post("/v1/chat/completions", json=body, headers=alice)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "30"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        with pytest.raises(RateLimited, match="alice") as over:
            await over_grpc(address, ALICE)
        assert over.value.retry_after_seconds == pytest.approx(30.0)
        for _ in range(4):
            assert (await http.post("/v1/chat/completions", json=body, headers=bob)).status_code == 200


@pytest.mark.parametrize("key", ["", ALICE, OWN_KEY], ids=["no keys demanded", "a client", "the server itself"])
@pytest.mark.parametrize(
    "method", ["GenerationService/Generate", "GenerationService/Tokenize", "OperationsService/AbortRequest"]
)
async def test_an_unreadable_message_is_an_invalid_argument_whoever_sends_it(
    tmp_path: Path, key: str, method: str
) -> None:
    keys = KeyRing(parse_keys(f"alice {ALICE} admin", "test") if key else (), own_key=OWN_KEY)
    async with serving(tmp_path, keys) as both, grpc.aio.insecure_channel(both.grpc_address) as channel:
        headers = (("authorization", f"Bearer {key}"),) if key else ()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in channel.unary_stream(f"/pilotfish.v1.{method}")(b"\xff" * 9, metadata=headers):
                pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a readable message" in str(refused.value.details())


async def test_tokens_and_answers_are_limited_by_the_settings(tmp_path: Path) -> None:
    bob = {"authorization": f"Bearer {BOB}"}
    body = {"messages": HI}
    async with limited(tmp_path / "a", ClientLimitsSection(tokens_per_minute=3)) as (http, _):
        assert (await http.post("/v1/chat/completions", json=body, headers=bob)).status_code == 200
        assert "tokens" in (await http.post("/v1/chat/completions", json=body, headers=bob)).json()["error"]["message"]
    async with limited(tmp_path / "b", ClientLimitsSection(concurrent_answers=2)) as (http, _):
        assert (await http.post("/v1/chat/completions", json=body | {"n": 3}, headers=bob)).status_code == 429
        for _ in range(3):
            assert (await http.post("/v1/chat/completions", json=body | {"n": 2}, headers=bob)).status_code == 200


async def test_answers_that_are_generated_and_not_returned_count_too(tmp_path: Path) -> None:
    bob = {"authorization": f"Bearer {BOB}"}
    body = {"prompt": "hi", "temperature": 0}
    async with limited(tmp_path / "free", ClientLimitsSection()) as (http, _):
        usage = (await http.post("/v1/completions", json=body, headers=bob)).json()["usage"]
    most = ClientLimitsSection(tokens_per_minute=2 * usage["total_tokens"] + usage["completion_tokens"])
    for best_of, statuses in ((1, [200, 200, 200, 429]), (2, [200, 200, 429]), (8, [200, 429])):
        async with limited(tmp_path / str(best_of), most) as (http, _):
            found = [
                (await http.post("/v1/completions", json=body | {"best_of": best_of}, headers=bob)).status_code
                for _ in statuses
            ]
        assert found == statuses, best_of


async def test_only_pages_of_named_origins_may_call(tmp_path: Path) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with limited(tmp_path, ClientLimitsSection()) as (http, _):
        allowed = await http.options("/v1/completions", headers={"origin": "https://chat.example.com", **asks})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert "access-control-allow-credentials" not in allowed.headers
        other = await http.options("/v1/completions", headers={"origin": "https://other.example.com", **asks})
        assert "access-control-allow-origin" not in other.headers
        unknown = await http.post("/v1/completions", json={}, headers={"origin": "https://chat.example.com"})
        assert unknown.status_code == 401
        assert unknown.headers["access-control-allow-origin"] == "https://chat.example.com"


def test_limits_in_key_files_and_settings_are_checked() -> None:
    (key,) = parse_keys(f"alice {ALICE} admin tokens_per_minute=5 concurrent_answers=2", "test")
    assert key.is_admin
    assert key.limits == ClientLimitsSection(tokens_per_minute=5, concurrent_answers=2)
    for wrong in ("tokens=5", "tokens_per_minute=0", "tokens_per_minute", "tokens_per_minute=a", ALICE):
        with pytest.raises(ConfigurationError, match="requests_per_minute=NUMBER") as error:
            parse_keys(f"alice {ALICE} {wrong}", "test")
        assert ALICE not in str(error.value)
    for origin in ("chat.example.com", "https://chat.example.com/page", ""):
        with pytest.raises(ConfigurationError, match=r"server\.cors_origins"):
            load({"server": {"cors_origins": [origin]}})
    assert load({"server": {"cors_origins": ["*", "http://a:1"]}}).server.cors_origins == ("*", "http://a:1")


async def test_limits_that_change_while_answers_are_generated_leave_nothing_counted(tmp_path: Path) -> None:
    limits = ClientLimitsSection(concurrent_answers=2)
    async with serving(tmp_path) as both:
        both.engine.hold_after = 1
        client = PublicClient(both.client, lambda _: limits)
        held = client.generate(Request(text="hi", request_id="held", n=2, client="alice"), 10.0)
        await anext(held)
        both.engine.hold_after = None
        limits = ClientLimitsSection(concurrent_answers=3)
        assert [one async for one in client.generate(Request(text="hi", client="alice"), 10.0)]
        with pytest.raises(RateLimited, match="has 2"):
            await anext(client.generate(Request(text="hi", n=2, client="alice"), 10.0))
        await held.aclose()
        assert [one async for one in client.generate(Request(text="hi", n=3, client="alice"), 10.0)]
