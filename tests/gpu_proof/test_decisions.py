"""The kernels that decide tokens, interpreted or on a GPU: the same tokens and the same bits as PyTorch's operators."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.request import SamplingParameters, ThinkingBudget
from tests.gpu_proof.device import DEVICE, needs_kernels
from tests.support.fakes.host_waits import OnGpu
from tests.support.fakes.rank_threads import RankThreads
from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide, merge_winners, shard_winners
from workers.sampling.decision_table import table_of
from workers.sampling.noise import gumbel
from workers.sampling.parts import Parts
from workers.sampling.winners import winners

pytestmark = needs_kernels()


@pytest.fixture(autouse=True, scope="module")
def _lines_of_noise() -> None:
    """The table of the noise is made once, without a fake device, and kept for the device as a tensor names it."""
    from workers.sampling.triton.noise import packed_chords

    packed_chords(torch.empty(0, device=DEVICE).device)


SIZES = [1, 33, 4096, 5000]


def logits_of(rows: int, size: int, seed: int, kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits `[rows, size]`: `wide` has hardly any equal ones, `coarse` many, `odd` also NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=generator) * 4
    if kind != "wide":
        logits = (logits * 2).round() / 2
    if kind == "odd":
        for value in (math.nan, math.inf, -math.inf, -0.0):
            logits[torch.rand(rows, size, generator=generator) < 0.05] = value
    return logits.to(dtype)


@st.composite
def contexts_for(draw: st.DrawFn, size: int) -> list[DecisionContext]:
    token = st.integers(0, size - 1)
    tokens = st.lists(token, min_size=1, max_size=20)
    biases = st.dictionaries(token, st.sampled_from([-100.0, 3.5, 100.0]), max_size=3)
    samplings = st.builds(
        SamplingParameters,
        temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
        top_k=st.sampled_from([0, 0, 1, 3, 40]),
        top_p=st.sampled_from([1.0, 1.0, 0.1, 0.5, 0.95, 0.9999999]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, -0.3]),
        logit_bias=biases.map(lambda one: tuple(one.items())),
        allowed_token_ids=st.one_of(st.just(()), st.lists(token, min_size=1, max_size=9, unique=True).map(tuple)),
        end_token_ids=st.just((size - 1,)),
        min_tokens=st.sampled_from([0, 30]),
        thinking=st.sampled_from([None, None, ThinkingBudget(end=(size // 2,), max_tokens=3)]),
        seed=st.integers(0, 2**64 - 1),
    )  # fmt: skip

    def context() -> DecisionContext:
        allowed = None
        if draw(st.integers(0, 3)) == 0:
            seed = draw(st.integers(0, 9))
            allowed = AllowedTokens(torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.3)
        return DecisionContext(draw(samplings), draw(tokens), 1, allowed)

    return [context() for _ in range(draw(st.integers(1, 4)))]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_decisions_are_those_of_the_reference(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES))
    contexts = data.draw(contexts_for(size))
    kind, dtype = (
        data.draw(st.sampled_from(["wide", "coarse", "odd"])),
        data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    logits = logits_of(len(contexts), size, data.draw(st.integers(0, 99)), kind, dtype)
    kept = logits.clone()
    expected = decide(logits, contexts)
    there = logits.to(DEVICE)
    with OnGpu() as gpu:
        assert decide(there, contexts) == expected
    assert gpu.waits == ["copies"]
    torch.testing.assert_close(logits, kept, rtol=0, atol=0, equal_nan=True)


SHARDS = [(0, 1700), (1700, 3400), (3400, 5000)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, in the threads of ranks
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_shards_have_the_same_scores_and_tokens_and_merge_to_the_decision(data: st.DataObject) -> None:
    """Scores and tokens are those that the operators of PyTorch find in the same shards, also of truncated rows."""
    from workers.sampling.triton.winners import TritonDecisions

    contexts = data.draw(contexts_for(5000))
    kind = data.draw(st.sampled_from(["wide", "coarse", "odd"]))
    logits = logits_of(len(contexts), 5000, data.draw(st.integers(0, 99)), kind)
    ranks = RankThreads(len(SHARDS))

    def found(rank: int, kernels: TritonDecisions | None) -> tuple[torch.Tensor, torch.Tensor]:
        first, end = SHARDS[rank]
        own = logits[:, first:end].to(DEVICE if kernels else "cpu")
        parts = Parts(rank, 5000, partial(ranks.all_gather, rank))
        scores, tokens = shard_winners(own, contexts, first, parts, kernels)
        return scores.cpu(), tokens.cpu()

    expected = ranks.run(partial(found, kernels=None))
    sent, ranks.sent = ranks.sent, []
    by_kernels = ranks.run(partial(found, kernels=TritonDecisions()))
    assert ranks.sent == sent, "as many bytes in as many rounds"
    for (values, tokens), own in zip(expected, by_kernels, strict=True):
        assert torch.equal(own[0], values)
        assert torch.equal(own[1][values > -math.inf], tokens[values > -math.inf])
    scores, ids = (torch.stack(column) for column in zip(*by_kernels, strict=True))
    assert merge_winners(scores, ids).tolist() == decide(logits, contexts)


@pytest.mark.parametrize(("top_k", "top_p"), [(3000, 1.0), (4000, 0.7)])
def test_of_equal_logits_the_lowest_tokens_are_kept_in_whichever_shard(top_k: int, top_p: float) -> None:
    from workers.sampling.triton.winners import TritonDecisions

    logits = torch.stack([torch.full((5000,), 1.0), logits_of(1, 5000, 3, "coarse")[0]])
    samplings = [SamplingParameters(seed=seed, top_k=top_k, top_p=top_p) for seed in range(2)]
    contexts = [DecisionContext(one, (5,), 1) for one in samplings]
    ranks = RankThreads(len(SHARDS))

    def merged(rank: int) -> list[int]:
        first, end = SHARDS[rank]
        parts = Parts(rank, 5000, partial(ranks.all_gather, rank))
        values, ids = shard_winners(logits[:, first:end].to(DEVICE), contexts, first, parts, TritonDecisions())
        return merge_winners(ranks.all_gather(rank, values), ranks.all_gather(rank, ids)).tolist()

    assert ranks.run(merged) == [decide(logits, contexts)] * len(SHARDS)


def test_noise_has_the_same_bits() -> None:
    """Where all logits are 0, the score of a row is its largest noise."""
    from workers.sampling.triton.winners import TritonDecisions

    seeds, positions, tokens = (0, 1, 2**63, 2**64 - 1), (1, 7, 131071, 2**31), range(100)
    for offset in tokens:
        sampling = [SamplingParameters(temperature=1.0, seed=seed) for seed in seeds]
        contexts = [DecisionContext(own, range(at), 0) for own, at in zip(sampling, positions, strict=True)]
        values, _ = winners(TritonDecisions(), torch.zeros(4, 1, device=DEVICE), table_of(contexts, offset, 1), offset)
        assert torch.equal(values.cpu(), gumbel(seeds, positions, offset, 1, "cpu").squeeze(1))


def test_neighbours_change_nothing() -> None:
    sampling = SamplingParameters(temperature=0.8, top_p=0.9, top_k=100, frequency_penalty=0.5, seed=5)
    others = [replace(sampling, seed=seed, top_k=0) for seed in range(3)]
    contexts = [DecisionContext(own, [3, 4, 4, 90], 1) for own in (sampling, *others)]
    logits = logits_of(4, 5000, 3, "coarse").to(DEVICE)
    with OnGpu():
        assert decide(logits, contexts) == [decide(logits[row : row + 1], [contexts[row]])[0] for row in range(4)]
