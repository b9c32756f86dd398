"""What one HTTP client may take: headers, time of headers and bodies, idle connections, answers left unread."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import psutil
from starlette.types import Receive, Scope, Send

from cluster.ingress.connections.protocol import ConnectionBounds
from tests.support.deadline import deadline
from tests.support.fakes.fake_engine import listening

SECONDS = 20.0
BOUNDS = ConnectionBounds(head_seconds=0.3, body_seconds=0.3, unread_seconds=0.3)
GET = b"GET / HTTP/1.1\r\nhost: a\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\n"
MIB = 1 << 20


class App:
    """Reads the body and answers with `parts` parts of `part`."""

    def __init__(self, part: bytes = b"done", parts: int = 1) -> None:
        self.part = part
        self.parts = parts
        self.bodies: list[bytes] = []
        self.sent = 0
        self.sent_when_cut_off = 0
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = b""
            while (message := await receive())["type"] == "http.request":
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            else:
                return
            self.bodies.append(body)
            watch = asyncio.create_task(self._watch(receive))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(self.parts):
                await send({"type": "http.response.body", "body": self.part, "more_body": True})
                self.sent += len(self.part)
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})
            await watch
        finally:
            self.ended.set()

    async def _watch(self, receive: Receive) -> None:
        await receive()
        self.sent_when_cut_off = self.sent


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    async def refusal(self) -> tuple[int, str]:
        """Status and code of an answer after which the server closes the connection."""
        head, _, body = (await self.rest()).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        return int(head.split()[1]), json.loads(body)["error"]["code"]


@asynccontextmanager
async def serving(app: App, bounds: ConnectionBounds = BOUNDS) -> AsyncIterator[Callable[[], asyncio.Future[Client]]]:
    """Yields a function that opens a connection with a small receive buffer."""
    async with listening(app, bounds=bounds) as address:
        port = int(address.rpartition(":")[2])
        clients: list[Client] = []

        async def connect() -> Client:
            plain = socket.socket()
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.setblocking(False)
            await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
            clients.append(Client(*await asyncio.open_connection(sock=plain, limit=1024)))
            return clients[-1]

        try:
            yield lambda: asyncio.ensure_future(connect())
        finally:
            for client in clients:
                client.writer.transport.abort()


@deadline(SECONDS)
async def test_a_whole_request_is_answered_and_its_connection_serves_another() -> None:
    app = App()
    async with serving(app) as connect:
        client = await connect()
        for _ in range(2):
            await client.send(POST + b"content-length: 3\r\n\r\nabc")
            assert b"done" in await client.reader.readuntil(b"0\r\n\r\n")
        assert app.bodies == [b"abc", b"abc"]


@deadline(SECONDS)
async def test_headers_that_are_too_long_are_refused_before_they_end() -> None:
    app = App()
    async with serving(app) as connect:
        many = b"".join(b"x-%d: a\r\n" % index for index in range(20_000))
        whole = b"x-a: " + b"a" * 65_530 + b"\r\n\r\n"
        for head in (GET + b"x-a: " + b"a" * 80_000, GET + many, GET + whole, b"GET /" + b"a" * 80_000):
            client = await connect()
            with suppress(ConnectionError):
                await client.send(head)
            assert await client.refusal() == (431, "headers_too_large")
        client = await connect()
        await client.send(GET + b"x-a: " + b"a" * 60_000 + b"\r\n\r\n")
        assert b" 200 " in await client.reader.readline()
    assert len(app.bodies) == 1


@deadline(SECONDS)
async def test_a_client_that_sends_no_whole_head_is_cut_off() -> None:
    app = App()
    async with serving(app) as connect:
        silent, slow, between = [await connect() for _ in range(3)]
        await slow.send(GET)
        await between.send(GET + b"\r\n")
        await between.reader.readuntil(b"0\r\n\r\n")
        await between.send(b"\r\n")
        assert await silent.rest() == b""
        assert await slow.refusal() == (408, "request_timeout")
        assert (await between.refusal())[0] == 408


@deadline(SECONDS)
async def test_a_head_that_arrives_byte_by_byte_is_cut_off() -> None:
    app = App()
    async with serving(app) as connect:
        client = await connect()
        refusal = asyncio.ensure_future(client.refusal())
        for byte in b"".join((GET, b"x-a: ", b"a" * 900)):
            await client.send(bytes([byte]))
            await asyncio.sleep(0.02)
            if refusal.done():
                break
        assert await refusal == (408, "request_timeout")
    assert app.bodies == []


@deadline(SECONDS)
async def test_a_body_that_does_not_arrive_is_refused() -> None:
    app = App()
    async with serving(app) as connect:
        client = await connect()
        await client.send(POST + b"content-length: 100\r\n\r\nabc")
        assert await client.refusal() == (408, "request_timeout")
        await app.ended.wait()
    assert app.bodies == []


@deadline(SECONDS)
async def test_framing_that_takes_far_more_than_the_body_ends_the_connection() -> None:
    app = App()
    async with serving(app, ConnectionBounds()) as connect:
        client = await connect()
        await client.send(POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-trailer: ")
        with suppress(ConnectionError):
            await client.send(b"a" * MIB)
        assert await client.rest() == b""
        await app.ended.wait()


@deadline(SECONDS)
async def test_a_client_that_does_not_read_holds_a_bounded_part_of_its_answer_and_is_cut_off() -> None:
    app = App(b"a" * 10_000, parts=5_000)
    async with serving(app) as connect:
        client = await connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET + b"\r\n")
        await app.ended.wait()
    # The kernel's buffers take a few MiB.
    assert 0 < app.sent_when_cut_off < app.parts * len(app.part) / 3


@deadline(SECONDS)
async def test_a_client_that_reads_gets_a_long_answer_whole() -> None:
    app = App(b"a" * 10_000, parts=500)
    async with serving(app) as connect:
        client = await connect()
        await client.send(GET + b"connection: close\r\n\r\n")
        answer = await client.rest()
    assert answer.count(b"a" * 10_000) == 500


@deadline(SECONDS)
async def test_a_connection_ends_though_the_end_of_its_answer_is_never_read() -> None:
    app = App(b"a" * 8 * MIB)
    async with serving(app) as connect:
        client = await connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET + b"connection: close\r\n\r\n")
        await app.ended.wait()
        port = client.writer.get_extra_info("peername")[1]
        while open_connections(port):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.05)


def open_connections(port: int) -> int:
    """Number of connections that this process has as a server at the port."""
    found = psutil.Process().net_connections("tcp")
    return sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in found)
