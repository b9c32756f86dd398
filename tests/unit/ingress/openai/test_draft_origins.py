"""Where the accepted draft tokens of an answer come from, over a whole cluster in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from deploy.local.local_cluster import LocalCluster
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.fakes.http_app import chunks
from tests.support.models import tiny, tiny_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY: dict[str, Any] = {
    "prompt": [50, 61, 72, 83, 94, 105],
    "max_tokens": 24,
    "temperature": 1.0,
    "seed": 4,
    "return_token_ids": True,
    "return_drafts": True,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    target: Path = tiny.save(tmp_path_factory.mktemp("origins"), tiny.llama(vocab_size=320))
    configuration = tiny_cluster(tiny_tokenizer.byte_level(target), {"method": "suffix", "controller": "off"})
    async with LocalCluster(configuration, http=True) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: LocalCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=120) as client:
        yield client


async def answered(http: httpx.AsyncClient, **values: Any) -> Any:
    response = await http.post("/v1/completions", json={**BODY, **values})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def accepted_origins(choice: Any) -> list[str]:
    return [draft["origins"][node] for draft in choice["drafts"] for node in draft["accepted"]]


def counted(origins: list[str]) -> dict[str, int]:
    return {name: origins.count(name) for name in ("request", "earlier", "trained", "forced")}


async def test_a_repeated_request_says_that_its_drafts_are_an_earlier_answer(http: httpx.AsyncClient) -> None:
    first, second = await answered(http), await answered(http)
    assert second["token_ids"] == first["token_ids"]
    assert first["receipt"]["accepted_by_origin"]["earlier"] == 0
    assert second["receipt"]["accepted_by_origin"]["earlier"] > 10
    for choice in (first, second):
        assert choice["receipt"]["accepted_by_origin"] == counted(accepted_origins(choice))
        assert sum(choice["receipt"]["accepted_by_origin"].values()) == choice["receipt"]["accepted"]


async def test_a_salt_of_its_own_keeps_earlier_answers_away(http: httpx.AsyncClient) -> None:
    await answered(http)
    found = await answered(http, cache_salt="another")
    assert found["receipt"]["accepted_by_origin"]["earlier"] == 0


async def test_a_metric_counts_accepted_tokens_by_origin(cluster: LocalCluster, http: httpx.AsyncClient) -> None:
    async def accepted() -> dict[str, float]:
        lines = (await http.get("/metrics")).text.splitlines()
        names = ("request", "earlier", "trained", "forced")
        return {
            name: float(line.rsplit(" ", 1)[1])
            for name in names
            for line in lines
            if line.startswith("pilotfish:accepted_tokens_by_origin_total") and f'origin="{name}"' in line
        }

    before = await accepted()
    choice = await answered(http)
    after = await accepted()
    grown = {name: after[name] - before[name] for name in after}
    assert grown == choice["receipt"]["accepted_by_origin"]


async def test_a_stream_that_is_resumed_after_its_last_event_has_the_same_counts(http: httpx.AsyncClient) -> None:
    body = {**BODY, "stream": True, "cache_salt": "resumed"}
    await http.post("/v1/completions", json=body)
    whole = await http.post("/v1/completions", json=body)
    events = whole.text.split("\n\n")
    early = events[len(events) // 2]
    event_id = next(line.removeprefix("id: ") for line in early.splitlines() if line.startswith("id: "))
    rest = await http.post("/v1/completions", json=body, headers={"Last-Event-ID": event_id})
    *_, last = [choice for event in chunks(whole) for choice in event["choices"]]
    *_, end = [choice for event in chunks(rest) for choice in event["choices"]]
    assert end["receipt"]["accepted_by_origin"]["earlier"] > 0
    for receipt in (last["receipt"], end["receipt"]):
        assert sum(receipt["accepted_by_origin"].values()) == receipt["accepted"]


async def test_tokens_that_a_grammar_forces_are_said_to_be_forced(http: httpx.AsyncClient) -> None:
    found = await answered(http, structured_outputs={"choice": ["abcdefghijklmnop"]})
    assert found["text"] == "abcdefghijklmnop"
    assert (
        found["receipt"]["accepted_by_origin"]["forced"] == len(found["token_ids"]) - found["receipt"]["target_passes"]
    )
