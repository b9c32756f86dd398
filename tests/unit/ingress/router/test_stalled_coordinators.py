"""A coordinator whose target is lost or frozen ends no step. Its streams go on at another one, if there is any."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.ingress.router import choice, pool
from cluster.ingress.router.choice import PrefixMemory, choose
from tests.support.clusters.coordinators import coordinator
from tests.support.clusters.fake_coordinators import FakeReplicas, fake_replicas
from tests.support.clusters.routed_requests import KINDS, answers_of, request_of
from tests.support.fakes.fake_cluster import until

STEP_SECONDS = 0.002
TOKENS = {kind: 8 if kind == "beams" else 200 for kind in KINDS}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams move after fractions of a second."""
    monkeypatch.setattr(choice, "STALLED_SECONDS", 0.5)
    monkeypatch.setattr(pool, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(pool, "WATCH_SECONDS", 0.05)


async def start_on_the_first(cluster: FakeReplicas, kinds: tuple[str, ...]) -> list[asyncio.Task[object]]:
    """Start streams on the first coordinator, then show the second one."""
    router = cluster.router()
    cluster.hidden = {cluster.replicas[1].name}
    reading = [asyncio.create_task(answers_of(router, request_of(kind, 8, TOKENS[kind]))) for kind in kinds]
    await asyncio.sleep(0.03)
    return reading  # type: ignore[return-value]


@pytest.mark.parametrize("fault", ["hang", "crash"])
async def test_streams_leave_a_coordinator_without_a_target(tmp_path: Path, fault: str) -> None:
    async with fake_replicas(tmp_path, 2, step_delay=STEP_SECONDS) as cluster:
        first, second = cluster.replicas
        router = cluster.router()
        expected = await asyncio.gather(*(answers_of(router, request_of(kind, 8, TOKENS[kind])) for kind in KINDS))
        reading = await start_on_the_first(cluster, KINDS)
        getattr(first.target, fault)()
        cluster.hidden.clear()
        second.target.batches.clear()
        assert await asyncio.gather(*reading) == expected
        assert second.target.batches
        assert cluster.resumed
        first.target.unhang() if fault == "hang" else first.target.revive()


async def test_streams_stay_where_no_other_coordinator_is_better(tmp_path: Path) -> None:
    async with fake_replicas(tmp_path, 2, step_delay=STEP_SECONDS) as cluster:
        first, second = cluster.replicas
        router = cluster.router()
        expected = await asyncio.gather(*(answers_of(router, request_of(kind, 8, TOKENS[kind])) for kind in KINDS))
        reading = await start_on_the_first(cluster, KINDS)
        first.target.hang()
        cluster.draining = {second.name}
        cluster.hidden.clear()
        await asyncio.sleep(1.0)
        assert not cluster.resumed
        first.target.unhang()
        assert await asyncio.gather(*reading) == expected


async def test_a_stream_leaves_a_stalled_coordinator_once(tmp_path: Path) -> None:
    async with fake_replicas(tmp_path, 2, step_delay=STEP_SECONDS) as cluster:
        first, second = cluster.replicas
        router = cluster.router()
        (expected,) = [await answers_of(router, request_of("sampled", 8, 200))]
        (reading,) = await start_on_the_first(cluster, ("sampled",))
        first.target.hang()
        second.target.hang()
        cluster.hidden.clear()
        async with asyncio.timeout(30.0):  # the second one is not stalled as long as it has no request
            await until(lambda: bool(cluster.resumed))
        first.target.unhang()
        await asyncio.sleep(1.0)
        assert len(cluster.resumed) == 1
        second.target.unhang()
        assert await reading == expected


def test_a_request_goes_to_a_stalled_coordinator_only_where_there_is_no_other() -> None:
    memory = PrefixMemory()
    stalled = coordinator("a", "127.0.0.1:1", stalled_seconds=10.0)
    busy = coordinator("b", "127.0.0.1:2", waiting=100)
    chosen = choose((), [stalled, busy], {}, memory)
    assert chosen is busy
    assert choose((), [stalled, busy], {}, memory, excluded=("b",)) is stalled
