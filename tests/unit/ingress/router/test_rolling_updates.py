"""Coordinators are replaced while streams run. A stream goes on where the answer is the same, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from cluster.core.config.sections import LimitsSection
from cluster.core.config.target_section import answer_version
from cluster.core.errors import ModelChanged
from cluster.ingress.http import create_app
from cluster.ingress.router import pool
from cluster.ingress.router.choice import continuing
from pilotfish.v1 import generation_pb2
from tests.support.clusters.coordinators import coordinator
from tests.support.clusters.fake_coordinators import fake_replicas
from tests.support.clusters.routed_requests import KINDS, TIMEOUT_SECONDS, answers_of, collect, request_of
from tests.support.fakes.fake_engine import listening
from workers.serve.configuration import load_configuration

STEP_SECONDS = 0.002


async def joined(
    first: generation_pb2.GenerateResponse, rest: AsyncIterator[generation_pb2.GenerateResponse]
) -> AsyncIterator[generation_pb2.GenerateResponse]:
    yield first
    async for response in rest:
        yield response


def version_with(**changes: object) -> str:
    return answer_version(load_configuration({}, {key.replace("__", "."): v for key, v in changes.items()}).target)


def test_settings_of_speed_and_memory_leave_the_version_and_those_of_answers_change_it() -> None:
    first = version_with()
    assert first == version_with(target__replicas=3, target__tensor_parallel=3, target__kv__pool_bytes=1 << 30)
    assert first == version_with(draft__method="suffix", target__threads=2, target__served_name="other")
    changed = [
        version_with(target__path="other"),
        version_with(target__dtype="bfloat16"),
        version_with(target__quantization="int8"),
        version_with(target__kv__window=64),
        version_with(target__acceptance="typical"),
        version_with(target__acceptance="typical", target__typical__epsilon=0.2),
    ]
    assert len({first, *changed}) == 1 + len(changed)


def test_only_coordinators_of_its_version_and_those_without_one_continue_a_stream() -> None:
    old, new, single = (coordinator(name, "127.0.0.1:1") for name in ("old:a", "new:b", "server"))
    assert continuing([old, new, single], "old:lost") == [old, single]
    assert continuing([old, new, single], "") == [old, new, single]
    assert continuing([old, new], "server") == [old, new]
    assert continuing([], "old:lost") == []
    with pytest.raises(ModelChanged, match="another model or other settings are served"):
        continuing([new], "old:lost")


async def test_streams_go_on_at_the_coordinator_of_their_version(tmp_path: Path) -> None:
    requests = [request_of(kind, 6, max_tokens=100) for kind in KINDS if kind not in ("best", "beams")]
    async with fake_replicas(tmp_path, 3, step_delay=STEP_SECONDS) as cluster:
        router, (first, other, second) = cluster.router(), cluster.replicas
        expected = [await answers_of(router, request) for request in requests]
        first.name, other.name, second.name = "old:r0", "new:r1", "old:r2"
        cluster.hidden = {"new:r1", "old:r2"}
        streams = [router.generate(request, TIMEOUT_SECONDS) for request in requests]
        begun = await asyncio.gather(*map(anext, streams))
        other.target.batches.clear()
        cluster.hidden.clear()
        await first.die()
        whole = [joined(response, stream) for response, stream in zip(begun, streams, strict=True)]
        answers = await asyncio.gather(*(collect(one, request) for one, request in zip(whole, requests, strict=True)))
        assert answers == expected
    assert cluster.resumed
    assert not other.target.batches


async def test_a_stream_that_nobody_can_continue_ends_with_a_precise_error_over_both_apis(tmp_path: Path) -> None:
    async with fake_replicas(tmp_path, 2, step_delay=STEP_SECONDS) as cluster:
        router, (old, new) = cluster.router(), cluster.replicas
        old.name, new.name = "old:r0", "new:r1"
        cluster.hidden = {"new:r1"}
        stream = router.generate(request_of("sampled", 1, max_tokens=200), 60.0)
        await anext(stream)
        async with listening(create_app(router, LimitsSection())) as url, httpx.AsyncClient(base_url=url) as http:
            body = {"model": "fake", "prompt": "hello", "max_tokens": 200, "seed": 1, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                last = await anext(line.removeprefix("id: ") async for line in response.aiter_lines())
            await old.die()
            cluster.hidden = {"old:r0"}
            with pytest.raises(ModelChanged):
                async for _ in stream:
                    pass
            refused = await http.post("/v1/completions", json=body, headers={"Last-Event-ID": last})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "model_changed"


async def test_a_silent_stream_stays_with_a_coordinator_that_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(pool, "WATCH_SECONDS", 0.05)
    async with fake_replicas(tmp_path, 2, step_delay=STEP_SECONDS) as cluster:
        router, (first, second) = cluster.router(), cluster.replicas
        expected = await answers_of(router, request_of("sampled", 2))
        second.target.batches.clear()
        cluster.hidden = {second.name}
        reading = asyncio.create_task(answers_of(router, request_of("sampled", 2)))
        await asyncio.sleep(0.02)
        first.target.hang()
        cluster.hidden, cluster.draining = set(), {first.name}
        await asyncio.sleep(0.5)
        assert not second.target.batches
        assert await answers_of(router, request_of("greedy", 2))  # a new request goes elsewhere
        assert second.target.batches
        first.target.unhang()
        assert await reading == expected
        assert not cluster.resumed
