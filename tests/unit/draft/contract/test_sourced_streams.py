"""The contract of every drafting method that serves encoder-decoder targets, in a cluster with one of each family."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.unit.draft.contract.methods import SOURCED_CASES, Directories, cases_of
from tests.unit.draft.contract.test_streams import NEVER_RIGHT, REPEATED, RIGHT, TOKENS, Answer, answer_all, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sourced(request: pytest.FixtureRequest, models: Callable[[str], Directories]) -> Directories:
    return models(request.param)


@pytest.fixture(scope="module")
def plain(sourced: Directories) -> list[tuple[int, ...]]:
    """The answers of the target alone."""

    async def decode() -> list[Answer]:
        async with serving("none", sourced) as client:
            return await answer_all(client)

    answers = [one.tokens for one in asyncio.run(decode())]
    assert all(tokens == (REPEATED,) * TOKENS for tokens in answers[: len(RIGHT)])
    assert len(set(answers[len(RIGHT) :])) > len(NEVER_RIGHT)
    return answers


@pytest.mark.parametrize(("sourced", "name", "place"), SOURCED_CASES, indirect=["sourced"])
async def test_drafts_change_no_token(
    name: str, place: str, sourced: Directories, plain: list[tuple[int, ...]]
) -> None:
    """Drafts that are right, drafts that are never right, and usual ones, all at once."""
    cases = cases_of(name)
    async with serving(name, sourced, placement=place) as client:
        answers = await answer_all(client)
        without = await answer_all(client, drafts=False)
    assert [one.tokens for one in answers] == [one.tokens for one in without]
    assert all(one.drafted == 0 for one in without)
    assert sum(one.drafted for one in answers) > 0
    if all(case.is_lossless for case in cases):
        assert [one.tokens for one in answers] == plain
    if any(case.is_lossless and case.finds_repetitions for case in cases):
        assert all(one.accepted > 0 for one in answers[: len(RIGHT)])
    if name in ("prediction", "ngram"):
        assert all(one.accepted <= one.drafted // 2 for one in answers[len(RIGHT) :][: len(NEVER_RIGHT)])
