"""Ranks that have parts of the vocabulary keep the tokens that one rank keeps, and send no logits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.request import SamplingParameters
from tests.support.fakes.rank_threads import RankThreads
from workers.sampling import parts as parts_module
from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide, merge_winners, shard_winners
from workers.sampling.parts import Parts, truncate_part
from workers.sampling.truncate import truncate

VOCABULARY = 700

SAMPLINGS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 4, 60, 699, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.95, 0.9999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (650, 100.0))]),
    allowed_token_ids=st.sampled_from([(), (), (1, 2, 300, 699), (699,)]),
    seed=st.integers(0, 2**64 - 1),
)
CONTEXTS = st.builds(
    DecisionContext, SAMPLINGS, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8), st.just(1)
)
KINDS = ("wide", "coarse", "equal", "odd", "low")


def logits_of(rows: int, kind: str, seed: int) -> torch.Tensor:
    """Logits `[rows, VOCABULARY]`: `wide` has hardly any equal ones, `coarse` many; `odd` has NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCABULARY, generator=generator) * 4
    if kind == "equal":
        return torch.zeros_like(logits)
    if kind == "low":
        return torch.full_like(logits, torch.finfo(torch.float32).min)
    if kind != "wide":
        logits = (logits * 2).round() / 4
    if kind == "odd":
        for value in (math.nan, math.inf, -math.inf, -0.0):
            logits[torch.rand(rows, VOCABULARY, generator=generator) < 0.05] = value
        logits[0] = math.nan
    return logits


def in_parts(logits: torch.Tensor, contexts: list[DecisionContext], cuts: list[int]) -> tuple[list[int], RankThreads]:
    """The decisions of ranks whose parts end at the cuts, the same on each of them."""
    bounds = list(pairwise([0, *cuts, logits.shape[1]]))
    ranks = RankThreads(len(bounds))

    def decided(rank: int) -> list[int]:
        first, end = bounds[rank]
        parts = Parts(rank, logits.shape[1], partial(ranks.all_gather, rank))
        values, ids = shard_winners(logits[:, first:end], contexts, first, parts)
        return merge_winners(ranks.all_gather(rank, values), ranks.all_gather(rank, ids)).tolist()

    first, *others = ranks.run(decided)
    assert all(one == first for one in others)
    return first, ranks


@settings(deadline=None, max_examples=40)
@given(
    st.lists(CONTEXTS, min_size=1, max_size=5),
    st.sampled_from(KINDS),
    st.sets(st.integers(1, VOCABULARY - 1), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_decisions_are_those_of_the_whole_vocabulary(
    contexts: list[DecisionContext], kind: str, cuts: set[int], seed: int
) -> None:
    logits = logits_of(len(contexts), kind, seed)
    kept = logits.clone()
    assert in_parts(logits, contexts, sorted(cuts))[0] == decide(logits, contexts)
    torch.testing.assert_close(logits, kept, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([one for one in KINDS if one != "odd"]),
    st.sampled_from([0, 1, 5, 350, 699, 700]),
    st.sampled_from([1.0, 0.001, 0.3, 0.9, 0.9999999]),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 99),
)
def test_the_same_logits_are_kept(kind: str, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    """Where many tokens have the smallest logit that is kept, the first of them are, whichever part has them."""
    samplings = [SamplingParameters(top_k=top_k, top_p=top_p, min_p=min_p)] * 2
    logits = logits_of(2, kind, seed)
    whole = logits.clone()
    truncate(whole, list(enumerate(samplings)))
    bounds = [(0, 100), (100, 101), (101, 500), (500, VOCABULARY)]
    ranks = RankThreads(len(bounds))

    def truncated(rank: int) -> torch.Tensor:
        part = logits[:, slice(*bounds[rank])].clone()
        truncate_part(part, samplings, Parts(rank, VOCABULARY, partial(ranks.all_gather, rank)))
        return part

    assert torch.equal(torch.cat(ranks.run(truncated), dim=1), whole)


def test_a_grammar_excludes_the_same_tokens_in_every_part() -> None:
    allowed = AllowedTokens(torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(1)) < 0.1)
    sampling = SamplingParameters(temperature=1.5, top_p=0.8, seed=3)
    contexts = [DecisionContext(replace(sampling, seed=seed), (5,), 1, allowed) for seed in range(8)]
    logits = logits_of(8, "coarse", 2)
    assert in_parts(logits, contexts, [234, 468])[0] == decide(logits, contexts)


@pytest.mark.parametrize("vocabulary", [700, 70_000])
@pytest.mark.parametrize(
    ("change", "searches"),
    [
        (SamplingParameters(min_p=0.1), 0),
        (SamplingParameters(top_k=40), 1),
        (SamplingParameters(top_p=0.9), 1),
        (SamplingParameters(top_k=40, top_p=0.9), 2),
    ],
    ids=["min-p", "top-k", "top-p", "top-k and top-p"],
)
def test_what_ranks_send_does_not_depend_on_the_vocabulary(
    vocabulary: int, change: SamplingParameters, searches: int
) -> None:
    """The largest logit, 256 sums of 8 bytes in each of four rounds, and the best score and its token."""
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(0))
    contexts = [DecisionContext(replace(change, seed=seed), (5,), 1) for seed in range(2)]
    found, ranks = in_parts(logits, contexts, [vocabulary // 3, vocabulary * 2 // 3])
    assert found == decide(logits, contexts)
    assert ranks.sent == [2 * 4, *[2 * 256 * 8] * 4 * searches, 2 * 4, 2 * 8]


def test_rows_in_pieces_are_decided_as_together(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(7, "coarse", 5)
    contexts = [DecisionContext(SamplingParameters(seed=row, top_p=0.9), (0,), 1) for row in range(7)]
    whole, _ = in_parts(logits, contexts, [300, 650])
    monkeypatch.setattr(parts_module, "_MOST_ELEMENTS", 2 * VOCABULARY)
    assert in_parts(logits, contexts, [300, 650])[0] == whole == decide(logits, contexts)


def test_neighbours_change_nothing() -> None:
    logits = logits_of(4, "wide", 6)
    samplings = [
        SamplingParameters(seed=9, top_p=0.9),
        SamplingParameters(seed=9, top_k=3),
        SamplingParameters(seed=9),
        SamplingParameters(seed=9, top_p=0.4, min_p=0.2),
    ]
    contexts = [DecisionContext(one, (0,), 1) for one in samplings]
    together, _ = in_parts(logits, contexts, [300, 650])
    alone = [in_parts(logits[row : row + 1], [context], [300, 650])[0] for row, context in enumerate(contexts)]
    assert [[token] for token in together] == alone
