"""The contract of every drafting method in a cluster: drafts change no token, whether they are right or wrong.

All requests run at once, greedy and sampled, at every place where the method can draft.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.deadline import deadline
from tests.support.slow import slow_but
from tests.unit.draft.contract.methods import NAMES_AND_PLACES, Directories, cases_of, values
from workers.serve.configuration import load_configuration

TIMEOUT_SECONDS = 120.0
"""Far above the duration of any test on a busy machine."""
TOKENS = 20
REPEATED = 77
"""The token that some requests repeat for ever, because of its bias."""
PHRASE = [40, 41, 42, 43, 44, 45, 46]


@dataclass(frozen=True)
class Answer:
    """An answer, and how many of its drafted tokens were verified and accepted."""

    tokens: tuple[int, ...]
    drafted: int
    accepted: int


def request(
    number: int, prediction: Sequence[int], sampling: common_pb2.SamplingParameters, **stopping: object
) -> generation_pb2.GenerateRequest:
    """A request whose prompt repeats a phrase."""
    prompt = [50 + number, *PHRASE, 60 + number, *PHRASE[: 3 + number % 3]]
    criteria = {"max_tokens": TOKENS, "ignore_eos": True, **stopping}
    return generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        prediction_token_ids=common_pb2.TokenIds(ids=prediction),
        sampling=sampling,
        stopping=generation_pb2.StoppingCriteria(**criteria),  # type: ignore[arg-type]
    )


def parameters(**changes: object) -> common_pb2.SamplingParameters:
    return common_pb2.SamplingParameters(**{"seed": 5, **changes})  # type: ignore[arg-type]


BIAS = [common_pb2.LogitBias(token_id=REPEATED, bias=100.0)]
WRONG = [99, 98, 97, 96] * 8
RIGHT = [
    request(0, [REPEATED] * TOKENS, parameters(temperature=0.0, logit_bias=BIAS)),
    request(1, [REPEATED] * TOKENS, parameters(temperature=0.9, logit_bias=BIAS)),
]
"""The target repeats one token."""
NEVER_RIGHT = [
    request(2, WRONG, parameters(temperature=0.0, repetition_penalty=2.0, frequency_penalty=2.0)),
    request(3, WRONG, parameters(temperature=2.0, repetition_penalty=2.0, presence_penalty=2.0)),
]
"""The target avoids every token that it has seen, and the prediction is wrong: most drafts are refused."""
USUAL = [
    request(4, PHRASE * 3, parameters(temperature=0.0)),
    request(5, PHRASE * 3, parameters(temperature=0.8, top_p=0.9)),
    request(6, (), parameters(temperature=1.0, top_k=20), stop_token_ids=[*range(3, 60)], min_tokens=9),
    request(7, PHRASE, parameters(temperature=0.0), stop_token_ids=[*range(3, 320, 5)], min_tokens=5),
]
REQUESTS = [*RIGHT, *NEVER_RIGHT, *USUAL]


@asynccontextmanager
async def serving(name: str, directories: Directories, **drafting: object) -> AsyncIterator[GenerationClient]:
    """A client of a running cluster."""
    configuration = load_configuration(values(name, directories, **drafting))
    async with (
        deadline(TIMEOUT_SECONDS),
        LocalCluster(configuration) as cluster,
        GenerationClient(fixed_address(cluster.grpc_address)) as client,
    ):
        yield client


async def answer(client: GenerationClient, message: generation_pb2.GenerateRequest) -> Answer:
    tokens: list[int] = []
    usage = generation_pb2.Usage()
    async for response in client.generate(message, TIMEOUT_SECONDS):
        tokens += response.delta.token_ids
        usage.MergeFrom(response.finished.usage)
    assert usage.completion_tokens == len(tokens)
    return Answer(tuple(tokens), usage.drafted_tokens, usage.accepted_draft_tokens)


async def answer_all(client: GenerationClient, drafts: bool = True) -> list[Answer]:
    """The answers to all requests, which are sent at once."""
    messages = [generation_pb2.GenerateRequest.FromString(one.SerializeToString()) for one in REQUESTS]
    for message in messages:
        if not drafts:
            message.max_draft_tokens = 0
    return list(await asyncio.gather(*(answer(client, message) for message in messages)))


@pytest.fixture(scope="module")
def plain(directories: Directories) -> list[tuple[int, ...]]:
    """The answers of the target alone."""

    async def decode() -> list[Answer]:
        async with serving("none", directories) as client:
            return await answer_all(client)

    answers = asyncio.run(decode())
    assert all(one.drafted == 0 for one in answers)
    assert all(one.tokens == (REPEATED,) * TOKENS for one in answers[: len(RIGHT)])
    assert 9 < len(answers[-2].tokens) <= TOKENS and 5 < len(answers[-1].tokens) <= TOKENS
    return [one.tokens for one in answers]


FAST = list({name: (name, place) for name, place in NAMES_AND_PLACES if "+" not in name}.values())
"""Each method at one place."""


@pytest.mark.parametrize("name_and_place", slow_but(FAST, NAMES_AND_PLACES), ids="-".join)
async def test_drafts_change_no_token(
    name_and_place: tuple[str, str], directories: Directories, plain: list[tuple[int, ...]]
) -> None:
    name, place = name_and_place
    cases = cases_of(name)
    async with serving(name, directories, placement=place) as client:
        answers = await answer_all(client)
        again, without = await asyncio.gather(answer_all(client), answer_all(client, drafts=False))
    assert [one.tokens for one in answers] == [one.tokens for one in again] == [one.tokens for one in without]
    assert all(one.drafted == 0 for one in without)
    if all(case.is_lossless for case in cases):
        assert [one.tokens for one in answers] == plain
    assert (sum(one.drafted for one in answers) > 0) == any(case.drafts for case in cases)
    if any(case.drafts and case.is_lossless and case.finds_repetitions for case in cases):
        assert all(one.accepted > 0 for one in answers[: len(RIGHT)])
    if all(case.is_lossless and not case.knows_target for case in cases):
        never = answers[len(RIGHT) :][: len(NEVER_RIGHT)]
        assert 2 * sum(one.accepted for one in never) <= sum(one.drafted for one in never)
