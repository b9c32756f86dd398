"""What web pages in browsers may do: hosts, origins, and bodies that a form could send."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.core.config.sections import LimitsSection
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.browsers import OWN_PAGES, BrowserRules
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.endpoints.page import Page
from cluster.ingress.http import create_app
from tests.support.fakes.fake_engine import MODEL, listening
from tests.support.fakes.http_app import HI, HttpApi, error_of

KEY = "alice-key-0123456789"
JSON = {"content-type": "application/json"}
BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'
ROUTES = [
    ("GET", "/"),
    ("GET", "/page/main.js"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/none"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/tokenize"),
    ("OPTIONS", "/v1/chat/completions"),
]


@asynccontextmanager
async def served(
    directory: Path, rules: BrowserRules = OWN_PAGES, keys: KeyRing | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP API on a loopback socket."""
    app = create_app(HttpApi(directory).client, LimitsSection(), page=Page(9000), browsers=rules, keys=keys)
    async with listening(app) as url, httpx.AsyncClient(base_url=url) as http:
        yield http


async def chat(http: httpx.AsyncClient, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await http.post("/v1/chat/completions", content=BODY, headers=JSON | named)).status_code


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_foreign_host_reads_nothing(tmp_path: Path, method: str, path: str) -> None:
    async with served(tmp_path) as http:
        response = await http.request(method, path, headers={"host": "attacker.example"})
        assert response.status_code == 403
        assert "attacker.example" in response.text and "server.allowed_hosts" in response.text


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "attacker.example:8000",
        "localhost.attacker.example",
        "127.0.0.1.attacker.example",
        "notlocalhost.example",
        "10.0.0.7",
        "[2001:db8::1]:8000",
        "localhost@attacker.example",
        "local host",
        "",
    ],
)
async def test_other_names_are_foreign_on_a_loopback_address(tmp_path: Path, host: str) -> None:
    async with served(tmp_path) as http:
        assert await chat(http, host=host) == 403


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.:8000",
        "a.localhost",
        "127.0.0.1",
        "127.1.2.3:80",
        "[::1]:8000",
        "0.0.0.0:8000",
        "[::]:8000",
        "pilotfish",
        "gpu-box:8000",
    ],
)
async def test_loopback_names_and_names_without_a_dot_are_served(tmp_path: Path, host: str) -> None:
    async with served(tmp_path) as http:
        assert await chat(http, host=host) == 200


@pytest.mark.parametrize(("hosts", "host", "status"), [
    (("gpu.lan",), "gpu.lan:8000", 200),
    (("gpu.lan",), "GPU.Lan", 200),
    (("gpu.lan",), "other.lan", 403),
    (("*.example.com",), "a.example.com", 200),
    (("*.example.com",), "a.b.example.com", 200),
    (("*.example.com",), "example.com", 403),
    (("*.example.com",), "badexample.com", 403),
    (("*",), "attacker.example", 200),
])  # fmt: skip
async def test_further_hosts_are_a_setting(tmp_path: Path, hosts: tuple[str, ...], host: str, status: int) -> None:
    async with served(tmp_path, BrowserRules(hosts=hosts)) as http:
        assert await chat(http, host=host) == status


@pytest.mark.parametrize(("address", "status"), [("10.1.2.3", 200), ("::ffff:10.1.2.3", 200), ("127.0.0.1", 403)])
async def test_an_address_is_served_where_the_server_is_reached_from_outside(
    tmp_path: Path, address: str, status: int
) -> None:
    """Probes and load balancers call a pod by its address, and a port may be published under another one."""
    app = create_app(HttpApi(tmp_path).client, LimitsSection())

    async def reached(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "server": (address, 8000)}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(reached), base_url="http://x") as http:
        assert (await http.get("/v1/models", headers={"host": "192.168.0.9:30080"})).status_code == status
        assert (await http.get("/v1/models", headers={"host": "attacker.example"})).status_code == 403


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_probes_are_answered_under_any_name(tmp_path: Path, path: str) -> None:
    async with served(tmp_path) as http:
        assert (await http.get(path, headers={"host": "attacker.example"})).status_code == 200


@pytest.mark.parametrize("origin", ["https://attacker.example", "null", "http://127.0.0.1:1", "file://", "x"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_pages_of_foreign_origins_are_refused(tmp_path: Path, method: str, path: str, origin: str) -> None:
    async with served(tmp_path) as http:
        response = await http.request(method, path, headers={"origin": origin})
        assert response.status_code == 403
        assert "server.cors_origins" in response.text


async def test_own_pages_may_call(tmp_path: Path) -> None:
    async with served(tmp_path, BrowserRules(hosts=("chat.example.com",))) as http:
        port = http.base_url.port
        assert await chat(http, origin=f"http://127.0.0.1:{port}") == 200
        assert await chat(http, host="localhost:80", origin="http://localhost") == 200
        assert await chat(http, host="chat.example.com", origin="https://chat.example.com") == 200  # TLS ends in front
        assert await chat(http, origin="https://chat.example.com", sec_fetch_site="same-origin") == 200
        assert await chat(http, origin="https://chat.example.com", sec_fetch_site="cross-site") == 403
        assert await chat(http, host="attacker.example", sec_fetch_site="same-origin") == 403


@pytest.mark.parametrize("origins", [("https://chat.example.com",), ("*",)])
async def test_pages_that_cors_allows_may_call(tmp_path: Path, origins: tuple[str, ...]) -> None:
    async with served(tmp_path, BrowserRules(origins)) as http:
        assert await chat(http, origin="https://chat.example.com") == 200
        asks = {"origin": "https://chat.example.com", "access-control-request-method": "POST"}
        assert (await http.options("/v1/chat/completions", headers=asks)).status_code == 200
        other = 200 if origins == ("*",) else 403
        assert await chat(http, origin="https://attacker.example") == other


async def test_pages_that_cors_allows_read_every_header_of_every_response(tmp_path: Path) -> None:
    """Without the headers of CORS, a page reads of an unexpected error only that the network failed."""

    def fail(_: object) -> Any:
        raise RuntimeError

    api, rules = HttpApi(tmp_path), BrowserRules(("https://chat.example.com",))
    app = create_app(api.client, LimitsSection(), browsers=rules)
    headers = JSON | {"origin": "https://chat.example.com"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://localhost"
    ) as http:
        bodies = [BODY, b'{"temprature": 1, ' + BODY[1:], b"{}"]
        responses = [await http.post("/v1/chat/completions", content=body, headers=headers) for body in bodies]
        api.engine.script = fail
        responses.append(await http.post("/v1/chat/completions", content=BODY, headers=headers))
    assert [response.status_code for response in responses] == [200, 200, 400, 500]
    own = {"content-length", "content-type", "vary"}
    for response in responses:
        assert response.headers["access-control-allow-origin"] == "https://chat.example.com"
        exposed = response.headers["access-control-expose-headers"].split(", ")
        read = {name for name in response.headers if not name.startswith("access-control-")}
        assert read - own <= set(exposed) and "x-request-id" in read


async def test_with_keys_any_name_and_page_is_served_to_who_has_one(tmp_path: Path) -> None:
    foreign = {"host": "pilotfish.example.com", "origin": "https://attacker.example"}
    async with served(tmp_path, keys=KeyRing(parse_keys(f"alice {KEY}", "keys"))) as http:
        assert await chat(http, **foreign) == 401
        assert await chat(http, **foreign, authorization=f"Bearer {KEY}") == 200


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/verify", "/tokenize", "/detokenize"]
)
async def test_a_body_must_say_that_it_is_json(tmp_path: Path, kind: str, path: str) -> None:
    async with served(tmp_path) as http:
        response = await http.post(path, content=BODY, headers={"content-type": kind})
        assert response.status_code == 400
        assert "content-type application/json" in error_of(response)["message"]


async def test_only_a_client_without_an_origin_may_leave_the_content_type_out(tmp_path: Path) -> None:
    async with served(tmp_path) as http:
        assert (await http.post("/v1/chat/completions", content=BODY)).status_code == 200
        own = str(http.base_url).rstrip("/")
        refused = await http.post("/v1/chat/completions", content=BODY, headers={"origin": own})
        assert refused.status_code == 400
        assert "content-type application/json" in error_of(refused)["message"]


async def test_a_compressed_body_is_refused_by_its_encoding(tmp_path: Path) -> None:
    async with served(tmp_path) as http:
        headers = JSON | {"content-encoding": "gzip"}
        refused = await http.post("/v1/chat/completions", content=gzip.compress(BODY), headers=headers)
        assert refused.status_code == 400
        assert error_of(refused)["param"] == "content-encoding"


async def test_the_client_of_openai_and_the_page_are_served(tmp_path: Path) -> None:
    async with served(tmp_path) as http:
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
            answer = await client.chat.completions.create(model=MODEL, messages=HI)  # type: ignore[arg-type]
        assert answer.choices[0].message.content
        assert (await http.get("/")).status_code == 200
