"""Under Ray Serve with three tensor-parallel ranks, clients receive exactly the tokens of the model alone.

A step of three ranks is slow on few cores, so some prompts are asked at once: short and long ones, greedy and sampled,
with drafts and without. `make nodes` asks every prompt, at once and alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.test_equality import Expected, check, check_drafts, configure, shortened
from tests.support.clusters.live_cluster import Server
from tests.support.clusters.serve_process import Deploy

pytestmark = [pytest.mark.weights, pytest.mark.ray]

RANKS = 3
METHOD = "ngram+model"
TOKENS = 6
EVERY = 4
"""One of so many prompts is asked."""


@pytest.fixture
def three_ranks(deploy: Deploy, target_directory: Path, draft_directory: Path) -> Server:
    """Three ranks, with drafts by prompt lookup and by a draft model."""
    return deploy(configure(target_directory, draft_directory, METHOD, RANKS)).server


async def test_three_ranks_answer_as_the_model_does(three_ranks: Server, greedy: Expected, sampled: Expected) -> None:
    some = dict([*greedy.items()][::EVERY] + [*sampled.items()][1::EVERY])
    drafted = shortened(some, TOKENS)
    check_drafts(METHOD, await check(three_ranks, drafted, concurrency=len(drafted)))

    plain = {replace(case, max_draft_tokens=0): answer for case, answer in drafted.items()}
    check_drafts("none", await check(three_ranks, plain, concurrency=len(plain)))
