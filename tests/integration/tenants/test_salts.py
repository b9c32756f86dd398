"""What names the client in the salt by which the cluster stores what it keeps of a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.errors import InvalidRequest
from cluster.core.ids import scoped_salt
from cluster.generation.validate import validate
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.router.choice import prefix_hashes
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from cluster.wire.peer_access import PublicAccess
from pilotfish.v1 import generation_pb2
from tests.support.fakes.both_apis import LIMITS, OWN_KEY, BothApis, Request, serving
from tests.support.fakes.both_apis import apis as apis
from tests.support.fakes.fake_engine import ScriptedEngine

ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789"
SALTS = ("", "mine", "/", "/mine", "bob/mine")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def asked(apis: BothApis, key: str | None, salt: str) -> tuple[str, str]:
    """The salts of two requests with one key, over HTTP and over gRPC, as the engine sees them."""
    await apis.http.post(
        "/v1/completions", json={"prompt": "hi", "cache_salt": salt}, headers={} if key is None else bearer(key)
    )
    client = GenerationClient(fixed_address(apis.grpc_address), PublicAccess(key))
    assert [one async for one in client.generate(Request(text="hi", cache_salt=salt, client="carol"), 10.0)]
    await client.close()
    over_http, over_grpc = apis.engine.requests[-2:]
    return over_http.cache_salt, over_grpc.cache_salt


async def test_no_two_keys_and_salts_ever_meet_in_one_salt_over_either_api(tmp_path: Path) -> None:
    keys = KeyRing(parse_keys(f"alice {ALICE}\nbob {BOB}", "keys"), own_key=OWN_KEY)
    seen = set()
    async with serving(tmp_path, keys) as apis:
        for key in (ALICE, BOB):
            for salt in SALTS:
                over_http, over_grpc = await asked(apis, key, salt)
                assert over_http == over_grpc
                seen.add(over_http)
    assert len(seen) == 2 * len(SALTS)


async def test_without_keys_nobody_has_a_name_and_the_salts_alone_count(tmp_path: Path) -> None:
    async with serving(tmp_path, KeyRing()) as apis:
        found = [await asked(apis, None, salt) for salt in SALTS]
        assert {request.client for request in apis.engine.requests} == {""}
    assert all(over_http == over_grpc for over_http, over_grpc in found)
    assert len(set(found)) == len(SALTS)


def test_sharing_between_keys_leaves_the_clients_own_salts() -> None:
    shared = {scoped_salt(client, salt, shares_between_keys=True) for client in ("", "a", "b") for salt in SALTS}
    assert shared == {scoped_salt("", salt, shares_between_keys=False) for salt in SALTS}


def test_a_name_cannot_pass_for_a_name_and_a_salt() -> None:
    info = ScriptedEngine(lambda _: ()).info
    with pytest.raises(InvalidRequest, match="client"):
        validate(Request(text="hi", client="alice/mine"), info, LIMITS, ())


def test_routing_remembers_prompts_by_client_unless_keys_share() -> None:
    one, other = (generation_pb2.GenerateRequest(text="x" * 999, client=name) for name in ("alice", "bob"))
    assert not set(prefix_hashes(one)) & set(prefix_hashes(other))
    assert prefix_hashes(one, shares_between_keys=True) == prefix_hashes(other, shares_between_keys=True)


async def test_the_card_of_the_model_says_whether_keys_share(apis: BothApis) -> None:
    (card,) = (await apis.http.get("/v1/models")).json()["data"]
    assert card["shares_between_keys"] is False
    (model,) = await apis.client.list_models()
    assert not model.shares_between_keys
