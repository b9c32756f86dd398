"""Under Ray Serve with three tensor-parallel ranks, every prompt is answered with exactly the model's own tokens.

`tests/integration/test_equality_ranks.py` asks for some of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.integration.test_equality import Expected, check, check_alone, check_drafts, shortened
from tests.integration.test_equality_ranks import METHOD, three_ranks
from tests.support.clusters.live_cluster import Server

__all__ = ["three_ranks"]

pytestmark = [pytest.mark.weights, pytest.mark.ray]

ALONE_TOKENS = 3
TOGETHER_TOKENS = 8
TOGETHER = 12


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
