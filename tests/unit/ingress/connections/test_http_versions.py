"""Clients of other versions of HTTP than 1.1: offers of HTTP/2, and HTTP/1.0."""

from __future__ import annotations

import json

import pytest
from uvicorn.config import HTTP_PROTOCOLS, Config

from cluster.ingress.connections.protocol import BoundedHttpProtocol
from deploy.ray.proxy import middlewares
from tests.support.deadline import deadline
from tests.unit.ingress.connections.test_connection_bounds import MIB, App, Client, serving

SECONDS = 20.0
OFFER = (
    b"POST / HTTP/1.1\r\nconnection: Upgrade, HTTP2-Settings\r\nhost: a\r\n"
    b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nupgrade: h2c\r\n"
)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


async def answer(client: Client) -> bytes:
    return await client.reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize("body", [b"content-length: 3\r\n\r\nabc", CHUNKED], ids=["length", "chunks"])
@pytest.mark.parametrize("parts", [1, 4, 1000])
@deadline(SECONDS)
async def test_an_offer_of_http2_is_ignored_and_the_body_is_read(body: bytes, parts: int) -> None:
    app, whole = App(), OFFER + body
    size = -(-len(whole) // parts)
    async with serving(app) as connect:
        client = await connect()
        for _ in range(2):  # the connection stays open, as after any request of HTTP/1.1
            for start in range(0, len(whole), size):
                await client.send(whole[start : start + size])
            assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
        assert app.bodies == [b"abc", b"abc"]


@pytest.mark.parametrize("offer", [b"websocket", b"h2c, h2", b"TLS/1.0"])
@deadline(SECONDS)
async def test_an_offer_of_any_protocol_is_ignored(offer: bytes) -> None:
    async with serving(app := App()) as connect:
        client = await connect()
        await client.send(
            b"GET / HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, upgrade\r\nupgrade: %s\r\n\r\n" % offer
        )
        assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
        assert app.bodies == [b""]


@deadline(SECONDS)
async def test_requests_that_follow_an_offer_at_once_are_answered() -> None:
    async with serving(app := App()) as connect:
        client = await connect()
        await client.send(2 * (OFFER + b"content-length: 3\r\n\r\nabc") + b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        for _ in range(3):
            assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
        assert app.bodies == [b"abc", b"abc", b""]


@deadline(SECONDS)
async def test_headers_of_an_offer_are_bounded() -> None:
    async with serving(App()) as connect:
        client = await connect()
        await client.send(OFFER + b"long: " + bytes([97]) * MIB + b"\r\n\r\n")
        assert await client.refusal() == (431, "headers_too_large")


@deadline(SECONDS)
async def test_a_body_after_an_offer_must_arrive_in_time() -> None:
    async with serving(App()) as connect:
        client = await connect()
        await client.send(OFFER + b"content-length: 3\r\n\r\na")
        assert await client.refusal() == (408, "request_timeout")


@pytest.mark.parametrize("header", [b"", b"connection: keep-alive\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n"])
@deadline(SECONDS)
async def test_an_answer_of_http_1_0_has_no_chunks_and_ends_by_closing(header: bytes) -> None:
    async with serving(App(b"part", parts=3)) as connect:
        client = await connect()
        await client.send(b"POST / HTTP/1.0\r\n" + header + b"content-length: 3\r\n\r\nabc")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert body == 3 * b"part"


@deadline(SECONDS)
async def test_a_refusal_over_http_1_0_has_its_length() -> None:
    async with serving(App()) as connect:
        client = await connect()
        await client.send(b"GET / HTTP/1.0\r\nbad header\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head and json.loads(body)


def test_the_server_of_serves_proxy_reads_connections_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])  # Serve's proxy names no protocol
    middlewares()
    config = Config(App(), lifespan="off")
    config.load()
    assert config.http_protocol_class is BoundedHttpProtocol
