"""A first rank of `pilotfish serve` waits for the replica that claims it, and is killed when that replica has ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.wire.peer_access import OPEN
from deploy.placement import Resources
from deploy.ray.start_ray import start_local_ray
from tests.support.models import tiny
from workers.serve import rank_placement
from workers.serve.rank_actors import FirstRank
from workers.serve.rank_placement import RankGroup, RankPlacement, WaitingRank

pytestmark = pytest.mark.ray

APPLICATION = "pilotfish"
NAMESPACE = "pilotfish"
TIMEOUT_SECONDS = 60.0
VARIABLES = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture
def local_ray() -> Iterator[None]:
    start_local_ray(Resources(2.0, 0, 1 << 30))
    yield
    ray.shutdown()


@pytest.fixture
def waiting(local_ray: None) -> Iterator[WaitingRank]:
    rank = WaitingRank(FirstRank, APPLICATION, VARIABLES)
    yield rank
    rank.stop()


def placement(application: str = APPLICATION) -> RankPlacement:
    return RankPlacement((FirstRank,), VARIABLES, standby=False, application=application)


def newest_name() -> str:
    names = (one["name"] for one in ray.util.list_named_actors(all_namespaces=True))
    return max(name for name in names if name.startswith(f"first-rank-{APPLICATION}-"))


async def process_of(rank: Any) -> int:
    return (await rank.place.remote()).process_id


async def test_a_waiting_rank_is_claimed_once(waiting: WaitingRank) -> None:
    waiting.start(again=False)

    assert await placement().claim() is not None
    assert await placement().claim() is None


async def test_the_rank_of_another_application_is_not_claimed(waiting: WaitingRank) -> None:
    waiting.start(again=False)

    assert await placement("another").claim() is None
    assert await placement("").claim() is None


async def test_another_rank_waits_once_a_claimed_one_has_ended(
    waiting: WaitingRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_placement, "_SETTLE_SECONDS", 0.1)
    waiting.start(again=True)
    first = await placement().claim()
    process = await process_of(first)

    ray.kill(first)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while (second := await placement().claim()) is None:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.1)

    assert await process_of(second) != process


async def test_the_next_rank_that_waits_knows_the_times_of_steps(
    waiting: WaitingRank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_placement, "_SETTLE_SECONDS", 0.1)
    target = {"path": str(tiny.save(tmp_path, tiny.llama())), "device": "cpu", "kv": {"pool_bytes": 1 << 20}}
    group = RankGroup({"target": target}, 1, "127.0.0.1", 0)
    waiting.start(again=True)
    first = await placement().claim()

    measured = (await first.start.remote(group, OPEN)).profile
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while (second := await placement().claim()) is None:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.1)

    assert measured
    assert (await second.start.remote(group, OPEN)).profile == measured


async def test_a_frozen_rank_is_killed_when_the_process_that_claimed_it_has_ended(waiting: WaitingRank) -> None:
    waiting.start(again=False)
    rank = ray.get_actor(newest_name(), NAMESPACE)
    process = psutil.Process(await process_of(rank))
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    assert await rank.claim.remote(owner.pid)
    await rank.until_claimed.remote()
    await asyncio.sleep(1.0)  # the driver hears of it

    process.suspend()
    owner.kill()
    await owner.wait()

    await asyncio.to_thread(process.wait, TIMEOUT_SECONDS)


async def test_a_rank_that_nobody_has_claimed_ends_with_the_application(waiting: WaitingRank) -> None:
    waiting.start(again=True)
    process = psutil.Process(await process_of(ray.get_actor(newest_name(), NAMESPACE)))

    waiting.stop()

    await asyncio.to_thread(process.wait, TIMEOUT_SECONDS)
    assert await placement().claim() is None


@pytest.mark.usefixtures("local_ray")
async def test_without_a_waiting_rank_there_is_nothing_to_claim() -> None:
    assert await placement().claim() is None
