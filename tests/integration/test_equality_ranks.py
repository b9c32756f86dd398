"""Under Ray Serve with three tensor-parallel ranks, every prompt is answered with exactly the tokens of the model.

A step of three ranks is slow on few cores, so the answers are short. Prompts are short and long, greedy and sampled.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.test_equality import Expected, check, check_alone, check_drafts, configure, shortened
from tests.support.clusters.live_cluster import Server
from tests.support.clusters.serve_process import Deploy

pytestmark = [pytest.mark.weights, pytest.mark.ray]

RANKS = 3
METHOD = "ngram+model"
TOGETHER = 12
TOGETHER_TOKENS = 8
ALONE_TOKENS = 3


@pytest.fixture
def three_ranks(deploy: Deploy, target_directory: Path, draft_directory: Path) -> Server:
    """Three ranks, with drafts by prompt lookup and by a draft model."""
    return deploy(configure(target_directory, draft_directory, METHOD, RANKS)).server


async def test_three_ranks_answer_each_prompt_alone_and_twelve_at_once_as_the_model_does(
    three_ranks: Server, greedy: Expected, sampled: Expected
) -> None:
    for expected in (greedy, sampled):
        check_drafts(METHOD, await check(three_ranks, shortened(expected, TOGETHER_TOKENS), concurrency=TOGETHER))
        await check_alone(three_ranks, shortened(expected, ALONE_TOKENS))


async def test_three_ranks_without_drafts_answer_as_the_model_does(
    three_ranks: Server, greedy: Expected, sampled: Expected
) -> None:
    """The requests disable drafts."""
    for expected in (greedy, sampled):
        some = list(shortened(expected, ALONE_TOKENS).items())[::3]
        plain = {replace(case, max_draft_tokens=0): answer for case, answer in some}
        check_drafts("none", await check(three_ranks, plain, concurrency=TOGETHER))
