"""Heads that predict the target's own distribution are accepted, on the target and in a process of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.config.sections import Configuration
from cluster.core.request import SamplingParameters
from tests.support.clusters.restartable_drafters import TIMEOUT_SECONDS, SamplingCase, restartable_cluster
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.deadline import deadline
from tests.support.models import context_free, tiny_tokenizer
from tests.support.models.plain_generation import write_alone
from workers.model.draft_shapes import HeadsShape

pytestmark = pytest.mark.slow

VOCABULARY = 320
TOKENS = 24
TAPS = (2,)
SHAPE = HeadsShape(depths=3, mix_rank=16, selector_rank=8)
SAMPLINGS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.8, top_p=0.9, seed=11),
    SamplingParameters(temperature=1.0, seed=5),
    SamplingParameters(temperature=1.0, top_k=20, presence_penalty=0.5, seed=2**64 - 1),
    SamplingParameters(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3),
)
CASES = [SamplingCase(number, sampling, TOKENS, VOCABULARY) for number, sampling in enumerate(SAMPLINGS)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target"))
    return context_free.save_target(directory, VOCABULARY)


@pytest.fixture(scope="module")
def right(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that predict the target's own distribution."""
    return context_free.save_untrained(target, tmp_path_factory.mktemp("right"), "heads", TAPS, SHAPE)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[tuple[int, ...]]:
    """The tokens that `transformers` generates."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return [write_alone(model, case.prompt, case.sampling, TOKENS) for case in CASES]


def configure(target: Path, heads: Path, method: str, **drafting: Any) -> Configuration:
    drafting = {"max_nodes": 6, "max_depth": 3, "timeout_seconds": 5.0, "controller": "off"} | drafting
    own = {"method": method, method: {"path": str(heads)}}
    return tiny_cluster(target, drafting | own, scheduler={"max_sequences": 8, "max_step_tokens": 64})


@pytest.mark.parametrize("placement", ["target", "drafter"])
@pytest.mark.parametrize("method", ["heads", "blockwise"])
async def test_heads_that_know_the_distribution_are_accepted_greedy_and_sampled(
    method: str, placement: str, target: Path, right: Path, expected: list[tuple[int, ...]]
) -> None:
    """Sampled rows agree only if every depth is ranked with the noise of its own position."""
    configuration = configure(target, right, method, placement=placement)
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration) as cluster:
        assert bool(cluster.drafters) == (placement == "drafter")
        answers = await cluster.answer_all(CASES)
    assert [answer.tokens for answer in answers] == expected
    for answer in answers[:3]:  # penalties of drafted tokens are not foreseen
        assert answer.accepted > 0.5 * TOKENS
