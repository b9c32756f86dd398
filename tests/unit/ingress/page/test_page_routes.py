"""The routes of the page: files, headers, keys, route prefixes, and the button that kills a drafter."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from cluster.core.config.load import load
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.endpoints.page import Page
from cluster.ingress.http import create_app
from tests.support.fakes.http_app import LIMITS, HttpApi, error_of

# A namespace, and what the library that reads Markdown says of itself and puts before `www.`.
NAMES = {
    "http://www.w3.org/2000/svg",
    "http://",
    "https://github.com/markedjs/marked",
    "https://github.com/markedjs/marked.",
}
FILES = Path(__file__).parents[4] / "cluster" / "ingress" / "page"
ALICE, OPERATOR = "alice-key-0123456789", "operator-key-0123456789"
JSON = {"content-type": "application/json"}


class Drafters:
    """Counts how many drafters were killed."""

    def __init__(self, alive: int = 1) -> None:
        self.alive = alive
        self.killed = 0

    async def kill(self) -> bool:
        self.killed += min(1, self.alive)
        return self.alive > 0


def client_of(
    directory: Path, page: Page | None, keys: KeyRing | None = None, prefix: str = ""
) -> tuple[httpx.AsyncClient, FastAPI]:
    app = create_app(HttpApi(directory).client, LIMITS, keys=keys, page=page)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=prefix)
    return httpx.AsyncClient(transport=transport, base_url="http://pilotfish"), app


async def test_every_file_is_served_with_its_type_and_a_strict_policy(tmp_path: Path) -> None:
    http, app = client_of(tmp_path, Page(9000))
    names = sorted(file.name for file in FILES.iterdir())
    assert {"index.html", "main.js", "style.css", "fish.svg"} <= set(names)
    for name in names:
        response = await http.get("/" if name == "index.html" else f"/page/{name}")
        assert response.content == (FILES / name).read_bytes()
        kind = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
        assert response.headers["content-type"].startswith(kind[name.rpartition(".")[2]])
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        again = await http.get(response.url, headers={"if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert not {"/", "/page/{name}", "/demo/kill-drafter"} & set(app.openapi()["paths"])


def test_the_files_load_nothing_from_elsewhere_and_have_nothing_inline() -> None:
    for file in FILES.iterdir():
        text = file.read_text("utf-8")
        links = set(re.findall(r"https?://[^\s\"'`)]+", text)) - NAMES
        assert links == set(), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    html = (FILES / "index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", html)
    assert not re.search(r'(src|href)="/', html)  # absolute paths break under a route prefix


async def test_the_page_is_off_without_a_page(tmp_path: Path) -> None:
    http, _ = client_of(tmp_path, None)
    for path in ("/", "/page/main.js", "/page/settings.json"):
        response = await http.get(path)
        assert response.status_code == 404
        error_of(response)


async def test_unknown_files_are_not_found(tmp_path: Path) -> None:
    http, _ = client_of(tmp_path, Page(9000))
    for path in ("/page/unknown.js", "/page/..%2fhttp.py", "/page/", "/page/main.js/x"):
        assert (await http.get(path)).status_code == 404


async def test_the_settings_say_what_the_page_needs(tmp_path: Path) -> None:
    http, _ = client_of(tmp_path, Page(9123, Drafters().kill))
    found = (await http.get("/page/settings.json")).json()
    assert found == {"demands_key": False, "grpc_port": 9123, "can_kill_drafter": True}


async def test_the_page_is_open_where_keys_are_demanded_and_nothing_else_is(tmp_path: Path) -> None:
    drafters = Drafters()
    keys = KeyRing(parse_keys(f"alice {ALICE}\nops {OPERATOR} admin", "keys"))
    http, _ = client_of(tmp_path, Page(9000, drafters.kill), keys)
    assert (await http.get("/")).status_code == 200
    assert (await http.get("/page/settings.json")).json()["demands_key"] is True
    for path in ("/v1/models", "/cluster", "/pages", "/page"):
        assert (await http.get(path)).status_code == 401
    for key, status in ((None, 401), (ALICE, 403), (OPERATOR, 200)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert (await http.get("/cluster", headers=headers)).status_code == status
        response = await http.post("/demo/kill-drafter", headers=JSON | headers, content="{}")
        assert response.status_code == status
    assert drafters.killed == 1


async def test_a_drafter_is_killed_only_on_purpose(tmp_path: Path) -> None:
    drafters = Drafters()
    http, _ = client_of(tmp_path, Page(9000, drafters.kill))
    for headers in ({}, {"content-type": "text/plain"}):  # what a form on another site could send
        assert (await http.post("/demo/kill-drafter", content="{}", headers=headers)).status_code == 400
    assert drafters.killed == 0
    assert (await http.post("/demo/kill-drafter", json={})).json() == {"killed": 1}
    assert drafters.killed == 1
    drafters.alive = 0
    assert (await http.post("/demo/kill-drafter", json={})).status_code == 503
    http, _ = client_of(tmp_path, Page(9000))
    assert (await http.post("/demo/kill-drafter", json={})).status_code == 404


@pytest.mark.parametrize("path", ["/model/", "/model/page/main.js", "/model/page/settings.json"])
async def test_the_page_works_under_a_route_prefix(tmp_path: Path, path: str) -> None:
    http, _ = client_of(tmp_path, Page(9000), prefix="/model")
    assert (await http.get(path)).status_code == 200


async def test_the_prefix_itself_leads_to_the_page(tmp_path: Path) -> None:
    """The addresses in the page are relative, so its own must end with a slash."""
    keys = KeyRing(parse_keys(f"alice {ALICE}", "keys"))
    http, _ = client_of(tmp_path, Page(9000), keys, prefix="/model")
    response = await http.get("/model", follow_redirects=True)
    assert (response.status_code, response.url.path) == (200, "/model/")
    assert (await http.get("/model/v1/models")).status_code == 401


async def test_the_settings_turn_page_and_button_on_and_off() -> None:
    server = load({}).server
    assert (server.page, server.demo) == ("on", "off")
    server = load({"server": {"page": False, "demo": True}}).server  # YAML reads on and off as booleans
    assert (server.page, server.demo) == ("off", "on")
