"""Methods that draft on a target of three ranks, of which some are killed: no token changes, and drafts go on.

Each rank is a process. Rank 0 is killed in the middle of the answers, and the last rank in the middle of the rest. Each
time all ranks start anew without any sequence, and compute the committed tokens again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from cluster.core.config.sections import Configuration
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.implied_settings import with_implied_settings
from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import Victim
from tests.soak.watch import read_counts
from tests.support.clusters.restartable_drafters import restartable_cluster
from tests.support.deadline import deadline
from tests.unit.draft.contract.methods import Directories, make_directories
from tests.unit.draft.contract.test_ranks import RANKS, configure
from tests.unit.draft.contract.test_streams import BIAS, PHRASE, answer, parameters, request

pytestmark = pytest.mark.slow

METHODS = ("eagle:eagle3", "heads", "block:dspark", "mtp", "suffix+recycling")
TOKENS = 180
"""More than come before and between the kills: drafts are accepted within a dozen steps of each start."""
REQUESTS = [
    request(0, (), parameters(temperature=0.0, logit_bias=BIAS), max_tokens=TOKENS),
    request(1, (), parameters(temperature=0.9, logit_bias=BIAS), max_tokens=TOKENS),
    request(4, (), parameters(temperature=0.0)),
    request(5, PHRASE * 3, parameters(temperature=0.8, top_p=0.9)),
]
"""The target repeats one token in the first two answers, for which every method finds drafts."""
LONG = 2
SECONDS, POLL_SECONDS = 240.0, 0.005


@dataclass
class Received:
    """What a client has of all answers."""

    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in REQUESTS])
    accepted: int = 0
    """Drafted tokens among them."""

    async def read(self, client: GenerationClient, index: int) -> None:
        """Stream one answer."""
        async for response in client.generate(REQUESTS[index], SECONDS):
            self.tokens[index] += response.delta.token_ids
            self.accepted += response.delta.accepted_draft_tokens

    @property
    def is_unfinished(self) -> bool:
        """Whether no long answer is complete."""
        return all(len(tokens) < TOKENS for tokens in self.tokens[:LONG])

    async def accepts_more(self) -> bool:
        """Whether further drafted tokens arrive before a long answer ends."""
        before = self.accepted
        while self.accepted == before and self.is_unfinished:  # noqa: ASYNC110 - tokens come from a stream
            await asyncio.sleep(POLL_SECONDS)
        return self.accepted > before


@asynccontextmanager
async def processes(
    configuration: Configuration, logs: Path, drafters: int = 0
) -> AsyncIterator[tuple[ChaosCluster, GenerationClient]]:
    """The ranks of a target, its coordinator and drafters, each in a process, and a client."""
    ranks = (configuration.target.tensor_parallel,)
    cluster = ChaosCluster(with_implied_settings(configuration), ranks, drafters, 0, logs, seed=0)
    try:
        await cluster.start()
        client = GenerationClient(fixed_address(cluster.doors[0].address))
        while not await client.is_ready():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(POLL_SECONDS)
        yield cluster, client
        await client.close()
        cluster.check()
    finally:
        await cluster.stop()


def kill(victim: Victim) -> None:
    """Kill a process, and see it end before its owner does anything."""
    process = psutil.Process(victim.pid)
    victim.signal(signal.SIGKILL)
    process.wait(SECONDS)


def plain_answers(directories: Directories) -> list[list[int]]:
    """The answers to all requests, by one rank without drafts."""

    async def decode() -> list[list[int]]:
        async with restartable_cluster(configure("none", "drafter", directories, ranks=1)) as cluster:
            return [list((await answer(cluster.client, message)).tokens) for message in REQUESTS]

    return asyncio.run(decode())


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """A target with a KV head for each rank."""
    return make_directories(tmp_path_factory.mktemp("killed"), num_key_value_heads=RANKS)


@pytest.fixture(scope="module")
def plain(directories: Directories) -> list[list[int]]:
    """The answers of one rank without drafts, which is not killed."""

    return plain_answers(directories)


@pytest.mark.parametrize("name", METHODS)
async def test_killed_ranks_change_no_token_and_drafts_are_accepted_before_between_and_after(
    name: str, directories: Directories, plain: list[list[int]], tmp_path: Path
) -> None:
    received = Received()
    configuration = configure(name, "target", directories)
    async with deadline(SECONDS), processes(configuration, tmp_path) as (cluster, client):
        ranks = cluster.slots[:RANKS]
        async with asyncio.TaskGroup() as reading:
            for index in range(len(REQUESTS)):
                reading.create_task(received.read(client, index))
            for kills, rank in enumerate((0, RANKS - 1), start=1):
                assert await received.accepts_more()
                kill(cluster.victims()[rank])
                assert received.is_unfinished
                while len(cluster.replacements.seconds) < kills:
                    cluster.check()
                    await asyncio.sleep(POLL_SECONDS)
            assert await received.accepts_more()
        counts = await read_counts(client)
        assert min(slot.starts for slot in ranks) >= 3
    assert received.tokens == plain
    assert len(cluster.replacements.reasons) >= 2
    assert counts["pilotfish:target_replays_total"] >= LONG
