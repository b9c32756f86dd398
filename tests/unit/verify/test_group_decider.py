"""What ranks send each other to decide, and that the tokens are those of one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cluster.core.request import SamplingParameters
from tests.support.fakes.rank_threads import RankThreads
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide
from workers.transfer import HostCopies
from workers.verify import group_decider
from workers.verify.group_decider import GroupDecider

VOCABULARY, RANKS = 5000, 3
SHARD = -(-VOCABULARY // RANKS)
SAMPLINGS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.8, seed=1),
    SamplingParameters(temperature=0.9, seed=2, top_p=0.9),
    SamplingParameters(temperature=1.2, seed=3, top_k=40, top_p=0.95),
)
LOGPROBS = SamplingParameters(temperature=0.9, seed=4, top_k=7, logprobs=2)


class ThreadExchange:
    """The `Exchange` of one of the threads."""

    def __init__(self, ranks: RankThreads, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        return self._ranks.all_gather(self._rank, own)

    def gather(self, own: torch.Tensor) -> list[torch.Tensor] | None:
        found = self._ranks.all_gather(self._rank, own)
        return None if self._rank else list(found)

    def broadcast(self, numbers: torch.Tensor) -> None:
        numbers.copy_(self._ranks.all_gather(self._rank, numbers)[0])


def decided(samplings: tuple[SamplingParameters, ...]) -> tuple[list[int], list[int], list[int]]:
    """The tokens that all ranks read, those of one rank alone, and the bytes that rank 0 sends at a time."""
    logits = torch.randn(len(samplings), VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    contexts = [DecisionContext(one, (5, 6), 1) for one in samplings]
    ranks = RankThreads(RANKS)

    def tokens(rank: int) -> list[int]:
        first = rank * SHARD
        model = SimpleNamespace(vocabulary_size=VOCABULARY, vocabulary_offset=first, tensor_parallel=RANKS)
        decider = GroupDecider(cast("Any", model), rank, ThreadExchange(ranks, rank))
        return decider.launch(logits[:, first : first + SHARD], contexts, HostCopies()).tokens()

    found, *others = ranks.run(tokens)
    assert all(one == found for one in others)
    return found, decide(logits, contexts), ranks.sent


def test_no_logits_are_sent_for_top_k_and_top_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Largest logits of two rows, sums of 256 digits in four rounds for top-k and four for top-p, then the winners."""
    monkeypatch.setattr(group_decider, "GATHERS_TRUNCATED", frozenset())
    found, expected, sent = decided(SAMPLINGS)
    assert found == expected
    assert sent == [2 * 4, *[2 * 256 * 8] * 8, 4 * 2 * 8]


def test_on_cpus_the_logits_of_truncated_rows_are_gathered() -> None:
    found, expected, sent = decided(SAMPLINGS)
    assert found == expected
    assert sent == [2 * 2 * 8, 2 * SHARD * 4, 2 * 8]


def test_logits_are_gathered_where_log_probabilities_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_decider, "GATHERS_TRUNCATED", frozenset())
    found, expected, sent = decided((SAMPLINGS[1], LOGPROBS))
    assert found == expected
    assert sent == [2 * 8, SHARD * 4, 8]
