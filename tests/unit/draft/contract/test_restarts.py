"""The contract of every drafting method when the target is killed: a restart changes no token, and drafts go on.

The target is killed in the middle of all answers and starts without any sequence. Drafts on the target start with it.
"""

from __future__ import annotations

import asyncio

import pytest

from cluster.wire.generation_client import GenerationClient
from pilotfish.v1 import generation_pb2
from tests.support.clusters.restartable_drafters import restartable_cluster
from tests.support.deadline import deadline
from tests.unit.draft.contract.methods import (
    CHECKPOINTS,
    HEADS,
    NAMES_AND_PLACES,
    Directories,
    cases_of,
    places_of,
    values,
)
from tests.unit.draft.contract.test_streams import BIAS, PHRASE, REPEATED, TIMEOUT_SECONDS, answer, parameters, request
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.slow

STEPS = 12
"""Steps before the target is killed: enough for every method to find that a token repeats."""
TOKENS = 100
"""More than `STEPS` steps can write."""
REQUESTS = [
    request(0, [REPEATED] * TOKENS, parameters(temperature=0.0, logit_bias=BIAS), max_tokens=TOKENS),
    request(1, [REPEATED] * TOKENS, parameters(temperature=0.9, logit_bias=BIAS), max_tokens=TOKENS),
    request(4, PHRASE * 3, parameters(temperature=0.0)),
    request(5, PHRASE * 3, parameters(temperature=0.8, top_p=0.9)),
]
"""The target repeats one token in the first two answers."""
DRAFTED = [*NAMES_AND_PLACES, *((name, place) for name in (*CHECKPOINTS, *HEADS) for place in places_of(name))]


async def answers_of(client: GenerationClient, drafts: bool = True) -> list[tuple[int, ...]]:
    """The tokens of the answers to all requests, which are sent at once."""
    messages = [generation_pb2.GenerateRequest.FromString(one.SerializeToString()) for one in REQUESTS]
    for message in messages:
        if not drafts:
            message.max_draft_tokens = 0
    return [one.tokens for one in await asyncio.gather(*(answer(client, message) for message in messages))]


@pytest.fixture(scope="module")
def plain(directories: Directories) -> list[tuple[int, ...]]:
    """The answers of the target alone, which is not killed."""

    async def decode() -> list[tuple[int, ...]]:
        async with restartable_cluster(load_configuration(values("none", directories))) as cluster:
            return await answers_of(cluster.client)

    return asyncio.run(decode())


@pytest.mark.parametrize(("name", "place"), DRAFTED)
async def test_a_killed_target_changes_no_token_and_drafts_are_accepted_again(
    name: str, place: str, directories: Directories, plain: list[tuple[int, ...]]
) -> None:
    cases = cases_of(name)
    configuration = load_configuration(values(name, directories, placement=place))
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration, STEPS) as cluster:
        running = asyncio.create_task(answers_of(cluster.client))
        await cluster.target.killed.wait()
        assert not running.done()
        await cluster.target.stop()
        await cluster.target.start()
        answers = await running
        if not all(case.is_lossless for case in cases):
            plain = await answers_of(cluster.client, drafts=False)
    assert answers == plain
    before, after = cluster.target.engines
    assert (before.accepted > 0) == (after.accepted > 0) == any(case.drafts for case in cases)
