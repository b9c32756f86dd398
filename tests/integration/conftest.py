"""Prompts for the packaged model, and the answers of the model alone."""

from __future__ import annotations

import pytest

from tests.support.clusters.live_cluster import Reference, RequestCase
from tests.support.models.prompts import CHAT, PLAIN

GREEDY_TOKENS = 16
SAMPLED_TOKENS = 16


@pytest.fixture(scope="session")
def prompts(reference: Reference) -> list[tuple[int, ...]]:
    return [*map(reference.chat, CHAT), *map(reference.plain, PLAIN)]


@pytest.fixture(scope="session")
def greedy(reference: Reference, prompts: list[tuple[int, ...]]) -> dict[RequestCase, tuple[int, ...]]:
    return {RequestCase(prompt, GREEDY_TOKENS): reference.greedy(prompt, GREEDY_TOKENS) for prompt in prompts}


@pytest.fixture(scope="session")
def sampled(reference: Reference, prompts: list[tuple[int, ...]]) -> dict[RequestCase, tuple[int, ...]]:
    cases = [
        RequestCase(prompt, SAMPLED_TOKENS, temperature, top_p, seed)
        for seed, (prompt, (temperature, top_p)) in enumerate(
            zip(prompts[::2], [(0.7, 1.0), (1.0, 0.9), (0.5, 0.95)] * len(prompts), strict=False)
        )
    ]
    return {case: reference.sampled(case) for case in cases}
