"""Under Ray Serve with three tensor-parallel ranks, clients receive exactly the tokens of the model alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.test_equality import Expected, check, check_drafts, configure, shortened
from tests.support.clusters.serve_process import Deploy

pytestmark = [pytest.mark.weights, pytest.mark.ray]

RANKS = 3
ALONE_TOKENS = 3
TOGETHER_TOKENS = 8
TOGETHER = 12


@pytest.mark.parametrize("method", ["ngram", "model"])
async def test_three_ranks_answer_each_prompt_alone_and_twelve_at_once_as_the_model_does(
    method: str, deploy: Deploy, target_directory: Path, draft_directory: Path, greedy: Expected, sampled: Expected
) -> None:
    server = deploy(configure(target_directory, draft_directory, method, RANKS)).server
    for expected in (greedy, sampled):
        await check(server, shortened(expected, ALONE_TOKENS), concurrency=1)
        check_drafts(method, await check(server, shortened(expected, TOGETHER_TOKENS), concurrency=TOGETHER))


async def test_three_ranks_without_drafts_answer_as_the_model_does(
    deploy: Deploy, target_directory: Path, draft_directory: Path, greedy: Expected, sampled: Expected
) -> None:
    """The cluster has a draft model; the requests disable drafts."""
    server = deploy(configure(target_directory, draft_directory, "model", RANKS)).server
    for expected in (greedy, sampled):
        plain = {
            replace(case, max_draft_tokens=0): answer for case, answer in shortened(expected, ALONE_TOKENS).items()
        }
        check_drafts("none", await check(server, plain, concurrency=TOGETHER))
