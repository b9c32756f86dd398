"""A drafter's process is killed in the middle of all answers: no token changes, and a new process drafts again.

The drafts are of public formats, of a model that reads mask tokens, and of a model with other tokens than the target's.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.wire.generation_client import GenerationClient
from tests.chaos.test_killed_drafting_ranks import (
    POLL_SECONDS,
    REQUESTS,
    SECONDS,
    Received,
    kill,
    plain_answers,
    processes,
)
from tests.soak.watch import rounds_without_drafter
from tests.support.deadline import deadline
from tests.unit.draft.contract.methods import Directories, make_directories
from tests.unit.draft.contract.test_ranks import configure

pytestmark = pytest.mark.slow

METHODS = (
    *("eagle:eagle3", "eagle:peagle", "block:dflash", "block:dspark", "heads:hydra"),
    *("mtp", "model:pard", "model:text"),
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return make_directories(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def plain(directories: Directories) -> list[list[int]]:
    """The answers without drafts."""
    return plain_answers(directories)


async def read_all(client: GenerationClient) -> Received:
    """All answers, which are requested at once."""
    received = Received()
    await asyncio.gather(*(received.read(client, index) for index in range(len(REQUESTS))))
    return received


@pytest.mark.parametrize("name", METHODS)
async def test_a_killed_drafter_changes_no_token_and_a_new_one_drafts_again(
    name: str, directories: Directories, plain: list[list[int]], tmp_path: Path
) -> None:
    received = Received()
    configuration = configure(name, "drafter", directories, ranks=1)
    async with deadline(SECONDS), processes(configuration, tmp_path, drafters=1) as (cluster, client):
        async with asyncio.TaskGroup() as reading:
            for index in range(len(REQUESTS)):
                reading.create_task(received.read(client, index))
            assert await received.accepts_more()
            (drafter,) = (one for one in cluster.victims() if one.kind == "draft")
            kill(drafter)
            assert received.is_unfinished
        missed = await rounds_without_drafter(client)
        while not cluster.replacements.seconds:
            cluster.check()
            await asyncio.sleep(POLL_SECONDS)
        again = await read_all(client)
        while not again.accepted:
            assert again.tokens == plain
            again = await read_all(client)
    assert received.tokens == again.tokens == plain
    assert [kind for kind, _ in cluster.replacements.reasons] == ["draft"]
    assert missed > 0
