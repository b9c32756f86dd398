"""Drafts learn from a text only if the settings, the client's API key and the request allow it, over every API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.draft_section import LearnsFrom
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.key_ring import KeyRing
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from cluster.wire.peer_access import PublicAccess
from tests.support.fakes.both_apis import HI, OWN_KEY, BothApis, Request, serving
from tests.support.fakes.fake_engine import MODEL

TEACHER, OTHER = "teacher-key-0123456789", "other-key-0123456789"
KEYS = f"teacher {TEACHER} learn\nother {OTHER}"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": HI, "max_tokens": 3, "model": MODEL},
}


@pytest.fixture
async def apis(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[BothApis]:
    learns_from, has_keys = request.param
    keys = KeyRing(parse_keys(KEYS, "keys"), own_key=OWN_KEY) if has_keys else None
    async with serving(tmp_path, keys, learns_from=learns_from) as both:
        yield both


def setting(learns_from: LearnsFrom, *, keys: bool = True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("apis", [(learns_from, keys)], indirect=True, ids=[learns_from])


async def over_http(apis: BothApis, key: str | None, **fields: Any) -> list[bool]:
    """Whether the engine may learn from the requests of all routes."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    first = len(apis.engine.requests)
    for path, body in BODIES.items():
        response = await apis.http.post(path, json=body | fields, headers=headers)
        assert response.status_code == 200, (path, response.text)
    return [request.allows_learning for request in apis.engine.requests[first:]]


async def over_grpc(apis: BothApis, key: str | None, request: Request) -> bool:
    client = GenerationClient(fixed_address(apis.grpc_address), PublicAccess(key))
    async for _ in client.generate(request, 10.0):
        pass
    await client.close()
    return apis.engine.requests[-1].allows_learning


@setting("keys")
async def test_the_key_allows_it_and_a_request_forbids_it(apis: BothApis) -> None:
    assert await over_http(apis, TEACHER) == [True] * len(BODIES)
    assert await over_http(apis, TEACHER, store=False) == [False] * len(BODIES)
    assert await over_http(apis, OTHER) == [False] * len(BODIES)
    assert await over_grpc(apis, TEACHER, Request(text="hi"))
    assert not await over_grpc(apis, TEACHER, Request(text="hi", store=False))
    assert not await over_grpc(apis, OTHER, Request(text="hi"))


@setting("keys")
async def test_a_client_cannot_allow_it_itself(apis: BothApis) -> None:
    assert not await over_grpc(apis, OTHER, Request(text="hi", client_allows_learning=True))
    assert not await over_grpc(apis, OTHER, Request(text="hi", client_allows_learning=True, store=True))


@setting("keys", keys=False)
async def test_without_keys_nobody_has_allowed_it(apis: BothApis) -> None:
    assert await over_http(apis, None) == [False] * len(BODIES)


@setting("keys")
async def test_a_repeated_answer_teaches_nothing(apis: BothApis) -> None:
    body = {"request": BODIES["/v1/completions"], "receipt": {"seed": 5}, "text": "x"}
    headers = {"authorization": f"Bearer {TEACHER}"}
    assert (await apis.http.post("/v1/verify", json=body, headers=headers)).status_code == 200
    assert [request.allows_learning for request in apis.engine.requests] == [False]


@setting("all")
async def test_the_setting_for_all_holds_for_every_key_but_not_against_a_request(apis: BothApis) -> None:
    for key in (TEACHER, OTHER):
        assert await over_http(apis, key) == [True] * len(BODIES)
        assert await over_http(apis, key, store=False) == [False] * len(BODIES)
        assert not await over_grpc(apis, key, Request(text="hi", store=False))


@setting("none")
async def test_nothing_is_learned_by_default(apis: BothApis) -> None:
    assert await over_http(apis, TEACHER) == [False] * len(BODIES)
    assert not await over_grpc(apis, TEACHER, Request(text="hi", store=True, client_allows_learning=True))


@setting("keys")
async def test_a_request_cannot_ask_to_be_stored_where_nothing_is(apis: BothApis) -> None:
    headers = {"authorization": f"Bearer {TEACHER}"}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
        response = await apis.http.post(path, json=BODIES[path] | {"store": True}, headers=headers)
        assert response.status_code == 400
        assert "store" in response.text
