"""Drafters that read the target's hidden states change no token while targets and drafters stop and restart."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.request import SamplingParameters
from tests.support.clusters.restartable_drafters import TIMEOUT_SECONDS, FullAnswer, SamplingCase, restartable_cluster
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.deadline import deadline
from tests.support.models import drafting_modules, tiny, tiny_tokenizer

pytestmark = pytest.mark.slow

VOCABULARY = 320
TOKENS = 40
METHODS = ("block", "eagle")
PLACES = ("target", "drafter")
REPEATING = ((77, 100.0),)
"""A bias that makes the target repeat one token for ever, so that drafts are right."""
CASES = [
    SamplingCase(0, SamplingParameters(temperature=0.0), TOKENS, VOCABULARY),
    SamplingCase(5, SamplingParameters(temperature=0.8, top_p=0.9, seed=11), TOKENS, VOCABULARY),
    SamplingCase(11, SamplingParameters(temperature=0.0, logit_bias=REPEATING), TOKENS, VOCABULARY),
    SamplingCase(14, SamplingParameters(temperature=1.0, seed=3, logit_bias=REPEATING), TOKENS, VOCABULARY),
]
RIGHT = 2
"""Number of the last cases, in which drafts are right."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target"))
    return tiny.save(directory, tiny.llama(vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def modules(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random module of each kind."""
    directory = tmp_path_factory.mktemp("modules")
    for method in METHODS:
        drafting_modules.save(target, directory / method, method)
    return directory


def configure(target: Path, modules: Path, method: str, place: str = "drafter") -> Configuration:
    section = {} if method == "none" else {method: {"path": str(modules / method)}}
    drafting: dict[str, Any] = {"method": method, "placement": place, "controller": "off", "max_nodes": 6}
    drafting |= {"timeout_seconds": 5.0} | section
    return tiny_cluster(target, drafting, kv={"block_size": 4}, scheduler={"max_sequences": 8, "max_step_tokens": 64})


@pytest.fixture(scope="module")
def plain(target: Path, modules: Path) -> list[tuple[int, ...]]:
    """The answers of the target alone."""

    async def decode() -> list[FullAnswer]:
        async with restartable_cluster(configure(target, modules, "none")) as cluster:
            return await cluster.answer_all(CASES)

    return [answer.tokens for answer in asyncio.run(decode())]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
async def test_a_target_that_restarts_in_the_middle_of_answers_changes_no_token(
    method: str, place: str, target: Path, modules: Path, plain: list[tuple[int, ...]]
) -> None:
    configuration = configure(target, modules, method, place)
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration) as cluster:
        answers = await cluster.answer_before_during_and_after_a_restart(CASES)
    for disturbed in answers:
        assert [answer.tokens for answer in disturbed] == plain
    for undisturbed in (answers[0], answers[2]):  # the second time, the target has every prompt in its cache
        assert all(answer.accepted > 0 for answer in undisturbed[-RIGHT:])
        assert sum(answer.drafted for answer in undisturbed) > sum(answer.accepted for answer in undisturbed)


@pytest.mark.parametrize("method", METHODS)
async def test_drafters_that_restart_change_no_token(
    method: str, target: Path, modules: Path, plain: list[tuple[int, ...]]
) -> None:
    configuration = configure(target, modules, method)
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration) as cluster:
        answers = await cluster.answer_while_drafters_restart(CASES, random.Random(method), 2)
    assert all([answer.tokens for answer in disturbed] == plain for disturbed in answers)
