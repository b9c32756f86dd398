"""The first rank of `pilotfish serve` starts before Serve, and is claimed by one process, with which it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import ray

from deploy.placement import Resources
from deploy.ray.start_ray import start_local_ray
from workers.serve.rank_actors import FirstRank
from workers.serve.rank_placement import RankPlacement, start_early

pytestmark = pytest.mark.ray

APPLICATION = "pilotfish"
TIMEOUT_SECONDS = 60.0
VARIABLES = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture
def local_ray() -> Iterator[None]:
    start_local_ray(Resources(2.0, 0, 1 << 30))
    yield
    ray.shutdown()


@pytest.mark.usefixtures("local_ray")
async def test_an_early_rank_is_claimed_once() -> None:
    early = start_early(FirstRank, APPLICATION, VARIABLES)
    place = await early.place.remote()
    placement, other = (
        RankPlacement((FirstRank,), VARIABLES, standby=False, application=APPLICATION) for _ in range(2)
    )

    claimed = await placement.claim_early()

    assert await claimed.place.remote() == place
    assert await other.claim_early() is None
    assert await placement.claim_early() is None, "ranks that start later are new ones"


@pytest.mark.usefixtures("local_ray")
async def test_an_early_rank_ends_with_the_process_that_claimed_it() -> None:
    early = start_early(FirstRank, APPLICATION, VARIABLES)
    process = psutil.Process((await early.place.remote()).process_id)
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    assert await early.claim.remote(owner.pid)
    owner.kill()
    await owner.wait()

    await asyncio.to_thread(process.wait, TIMEOUT_SECONDS)


@pytest.mark.usefixtures("local_ray")
async def test_without_an_early_rank_there_is_nothing_to_claim() -> None:
    placement = RankPlacement((FirstRank,), VARIABLES, standby=False, application=APPLICATION)

    assert await placement.claim_early() is None
