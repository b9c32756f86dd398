"""Decisions, greedy and sampled, whole and by shards, depend only on logits and context."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from workers.sampling import decide as deciding
from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.context import Branch, DecisionContext, tree_contexts
from workers.sampling.decide import decide, is_shardable, merge_winners, shard_winners
from workers.sampling.noise import gumbel
from workers.sampling.warp import warp

INF = math.inf
GREEDY = SamplingParameters(temperature=0.0)
VOCABULARY = 16

SEEDS = st.integers(0, 2**64 - 1)
SHARDABLE = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (11, -100.0))]),
    end_token_ids=st.sampled_from([(), (3, 12)]),
    min_tokens=st.sampled_from([0, 4]),
    seed=SEEDS,
)
ANY = st.builds(
    replace,
    SHARDABLE,
    top_k=st.sampled_from([0, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)


def contexts_of(samplings: st.SearchStrategy[SamplingParameters]) -> st.SearchStrategy[list[DecisionContext]]:
    return st.lists(st.builds(DecisionContext, samplings, TOKENS, st.just(1)), min_size=1, max_size=6)


def logits_for(rows: int, seed: int) -> torch.Tensor:
    """Coarse logits with many ties: float32 [rows, VOCABULARY]."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randint(-8, 8, (rows, VOCABULARY), generator=generator) / 4


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_token_among_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 0.0, 2.0]])
    assert decide(logits, [DecisionContext(GREEDY, (0,), 1)] * 2) == [1, 0]


def test_the_lowest_token_wins_among_equals_in_a_long_row() -> None:
    logits = torch.zeros(3, 50_000)
    logits[1, [777, 40_000]] = 1.0
    logits[2, [49_998, 49_999]] = 1.0
    assert decide(logits, [DecisionContext(GREEDY, (0,), 1)] * 3) == [0, 777, 49_998]


def test_temperature_zero_applies_penalties_and_bias() -> None:
    sampling = replace(GREEDY, presence_penalty=2.0, logit_bias=((2, 0.5),))
    assert decide(torch.tensor([[1.0, 2.0, 0.9]]), [DecisionContext(sampling, (0, 1), 1)]) == [2]


def test_a_temperature_near_zero_takes_the_largest_logit() -> None:
    sampling = SamplingParameters(temperature=1e-30)
    assert decide(torch.tensor([[30.0, 31.0, -5.0]]), [DecisionContext(sampling, (0,), 1)]) == [1]


def test_a_drawn_token_is_the_argmax_of_warped_logits_plus_noise() -> None:
    logits = torch.randn(1, 1000)
    sampling = SamplingParameters(temperature=0.8, top_k=40, seed=11)
    context = DecisionContext(sampling, (1, 2, 3), 3)
    expected = (warp(logits, [context]) + gumbel([11], [3], 0, 1000, "cpu")).argmax().item()
    assert decide(logits, [context]) == [expected]


def test_seed_and_position_change_the_draw() -> None:
    logits = torch.zeros(1, 10_000)
    draws = {
        (seed, length): decide(logits, [DecisionContext(SamplingParameters(seed=seed), (0,) * length, 1)])[0]
        for seed in range(4)
        for length in range(1, 5)
    }
    assert len(set(draws.values())) == len(draws)


def test_an_excluded_token_is_never_drawn() -> None:
    logits = torch.zeros(500, 3)
    contexts = [DecisionContext(SamplingParameters(seed=seed, top_k=2), (0,), 1) for seed in range(500)]
    assert set(decide(logits, contexts)) == {0, 1}


def test_nan_is_never_chosen() -> None:
    logits = torch.tensor([[math.nan, 0.0, 1.0]] * 2)
    sampling = SamplingParameters(logit_bias=((1, 90.0),))
    assert decide(logits, [DecisionContext(GREEDY, (0,), 1), DecisionContext(sampling, (0,), 1)]) == [2, 1]


@pytest.mark.parametrize("sampling", [SamplingParameters(), GREEDY], ids=["drawn", "greedy"])
def test_rows_without_a_candidate_have_no_token_and_change_no_other(sampling: SamplingParameters) -> None:
    logits = torch.tensor([[-INF, 1.0], [math.nan, -INF], [-INF, -INF]])
    assert decide(logits, [DecisionContext(sampling, (0,), 1)] * 3) == [1, -1, -1]


def test_zero_rows_are_allowed() -> None:
    assert decide(torch.empty(0, 5), []) == []


def test_one_context_per_row_is_required() -> None:
    with pytest.raises(ValueError, match="1 contexts for 2 rows"):
        decide(torch.zeros(2, 3), [DecisionContext(GREEDY, (0,), 1)])


def test_the_callers_logits_are_never_changed() -> None:
    logits = torch.randn(2, 8)
    before = logits.clone()
    decide(logits, [DecisionContext(SamplingParameters(), (0,), 1), DecisionContext(GREEDY, (0,), 1)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_neither_autograd_nor_the_layout_of_logits_matters(mode: type) -> None:
    contexts = [DecisionContext(SamplingParameters(seed=row, temperature=0.5, top_p=0.9), (0,), 1) for row in range(4)]
    logits = torch.randn(4, 99, generator=torch.Generator().manual_seed(0))
    expected = decide(logits, contexts)
    with mode():
        assert decide(logits.clone().requires_grad_(), contexts) == expected
        assert decide(logits.t().contiguous().t(), contexts) == expected
        assert decide(logits[:1].expand(4, 99), contexts) == decide(logits[:1].repeat(4, 1), contexts)


@settings(deadline=None)
@given(contexts_of(ANY), st.randoms(use_true_random=False), SEEDS)
def test_a_decision_depends_on_neither_batch_nor_order(contexts: list[DecisionContext], random, seed: int) -> None:
    logits = logits_for(len(contexts), seed)
    together = decide(logits, contexts)
    assert together == [decide(logits[row : row + 1], [context])[0] for row, context in enumerate(contexts)]
    order = random.sample(range(len(contexts)), len(contexts))
    assert decide(logits[order], [contexts[row] for row in order]) == [together[row] for row in order]


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_for(50, 3)
    contexts = [DecisionContext(SamplingParameters(seed=row, top_p=0.9), (0,), 1) for row in range(50)]
    whole = decide(logits, contexts)
    monkeypatch.setitem(deciding._CHUNK_ELEMENTS, "cpu", 7 * VOCABULARY)
    assert decide(logits, contexts) == whole


@settings(deadline=None)
@given(contexts_of(SHARDABLE), st.sets(st.integers(1, VOCABULARY - 1)), SEEDS)
def test_shards_merge_to_the_whole_decision(contexts: list[DecisionContext], cuts: set[int], seed: int) -> None:
    logits = logits_for(len(contexts), seed)
    edges = [0, *sorted(cuts), VOCABULARY]
    winners = [shard_winners(logits[:, first:last], contexts, first) for first, last in pairwise(edges)]
    values = torch.stack([value for value, _ in winners])
    ids = torch.stack([token for _, token in winners])
    assert merge_winners(values, ids).tolist() == decide(logits, contexts)


def test_a_shard_without_candidates_leaves_the_decision_to_the_others() -> None:
    context = [DecisionContext(GREEDY, (0,), 1)]
    first = shard_winners(torch.tensor([[-INF, math.nan]]), context, 0)
    second = shard_winners(torch.tensor([[-3.0, -2.0]]), context, 2)
    merged = merge_winners(torch.stack([first[0], second[0]]), torch.stack([first[1], second[1]]))
    assert merged.tolist() == [3]


def test_equal_winners_merge_to_the_lower_token() -> None:
    assert merge_winners(torch.tensor([[1.0], [1.0]]), torch.tensor([[9], [4]])).tolist() == [4]


@pytest.mark.parametrize("change", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_truncation_requires_what_the_other_shards_find_unless_greedy(change: dict[str, float]) -> None:
    drawn = replace(SamplingParameters(), **change)
    with pytest.raises(ValueError, match="row 0: its sampling parameters need what the other shards find"):
        shard_winners(torch.zeros(1, 4), [DecisionContext(drawn, (0,), 1)], 0)
    greedy = [DecisionContext(replace(drawn, temperature=0.0), (0,), 1)]
    assert shard_winners(torch.zeros(1, 4), greedy, 0)[1].tolist() == [0]


def test_a_minimal_length_is_shardable() -> None:
    assert is_shardable(SamplingParameters(end_token_ids=(3,), min_tokens=5))


def test_penalties_are_shardable_and_logprobs_are_not() -> None:
    assert is_shardable(SamplingParameters(repetition_penalty=1.2, presence_penalty=1.0, logit_bias=((1, 1.0),)))
    assert not is_shardable(SamplingParameters(temperature=0.0, logprobs=0))


def test_the_context_of_a_node_has_its_path_and_no_siblings() -> None:
    tree = TokenTree(tokens=(5, 6, 7, 8), parents=(-1, -1, 0, 2))
    contexts = tree_contexts(GREEDY, [1, 2], 1, tree)
    assert [list(context.tokens) for context in contexts] == [
        [1, 2],
        [1, 2, 5],
        [1, 2, 6],
        [1, 2, 5, 7],
        [1, 2, 5, 7, 8],
    ]
    assert [context.position for context in contexts] == [2, 3, 3, 4, 5]


def test_a_branch_equals_the_sequence_of_its_tokens() -> None:
    branch = Branch([1, 2, 3], (4, 5))
    joined = (1, 2, 3, 4, 5)
    assert tuple(branch) == joined
    assert len(branch) == 5
    assert [branch[index] for index in range(-5, 5)] == [joined[index] for index in range(-5, 5)]
    assert tuple(branch[2:]) == joined[2:]
    with pytest.raises(IndexError):
        branch[5]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_makes_the_same_decisions_from_the_same_logits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(32, 128_256, generator=generator) * 3).to(dtype)
    settings: list[dict[str, Any]] = [
        {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.0},
        {"top_p": 0.999, "frequency_penalty": 0.5}, {"logit_bias": ((77, 9.0),)}, {"allowed_token_ids": (5, 9, 2000)},
    ]  # fmt: skip
    allowed = AllowedTokens(torch.rand(128_256, generator=generator) < 0.5)
    contexts = [
        DecisionContext(
            SamplingParameters(seed=row, repetition_penalty=1.1, **settings[row % 8]),
            (1, 2, 3),
            1,
            allowed if row % 3 == 0 and row % 8 != 7 else None,
        )
        for row in range(32)
    ]
    assert decide(logits.cuda(), contexts) == decide(logits, contexts)


@pytest.mark.parametrize("logits", [[1.0, 3.0, 3.0, 2.0], [1.0, math.nan, 3.0, 2.0], [-math.inf, 0.0, math.inf, 1.0]])
@pytest.mark.parametrize("bad_words", [(), ((2,),), ((1,), (2,))])
def test_a_look_at_the_largest_logit_decides_as_the_scores_do(
    logits: list[float], bad_words: tuple[tuple[int, ...], ...]
) -> None:
    context = DecisionContext(SamplingParameters(temperature=0.0, bad_words=bad_words), [5], 1)
    # A bias of nothing lets the scores decide.
    other = DecisionContext(replace(context.sampling, logit_bias=((0, 0.0),)), [5], 1)
    rows = torch.tensor([logits, logits])
    assert decide(rows, [context, context]) == decide(rows, [other, other])
