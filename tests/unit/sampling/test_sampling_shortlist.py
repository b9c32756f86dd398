"""A complete short list has exactly the tokens that truncation keeps, including ties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.request import SamplingParameters
from workers.sampling import shortlist, truncate
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide
from workers.sampling.noise import gumbel
from workers.sampling.shortlist import Shortlist, shortlists
from workers.sampling.warp import warp

INF = math.inf
SIZE = 300
WIDTHS = (8, 32)

KINDS = {
    "peaked": lambda noise: noise * 4,
    "flat": lambda noise: noise * 1e-3,
    "coarse": lambda noise: (noise * 2).round() / 2,
    "equal": lambda noise: torch.zeros_like(noise),
    "two heights": lambda noise: (noise > 1.5).float() * 3,
    "mostly impossible": lambda noise: torch.where(noise > 1.8, noise, -INF),
    "impossible": lambda noise: torch.full_like(noise, -INF),
    "far apart": lambda noise: noise * 1e4,
}
SAMPLINGS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7, 8, 9, 31, 32, 33, SIZE, 1000]),
    top_p=st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortlist, "_WIDTHS", WIDTHS)


def rows_of(kinds: list[str], seed: int) -> torch.Tensor:
    noise = torch.randn(len(kinds), SIZE, generator=torch.Generator().manual_seed(seed))
    return torch.stack([KINDS[kind](row) for kind, row in zip(kinds, noise, strict=True)])


def whole(found: Shortlist, place: int) -> torch.Tensor:
    row = torch.full((SIZE,), -INF)
    row[found.columns[place]] = found.logits[place]
    return row


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), SAMPLINGS), min_size=1, max_size=5), st.integers(0, 2**32))
def test_a_short_list_has_the_tokens_that_truncation_keeps_of_the_whole_row(
    rows: list[tuple[str, SamplingParameters]], seed: int
) -> None:
    logits = rows_of([kind for kind, _ in rows], seed)
    samplings = [(row, sampling) for row, (_, sampling) in enumerate(rows)]
    expected = logits.clone()
    truncate.truncate(expected, samplings)
    before = logits.clone()
    found, others = shortlists(logits, samplings)
    assert torch.equal(logits, before)
    settled = [row for listed in found for row in listed.rows]
    assert sorted(settled + [row for row, _ in others]) == list(range(len(rows)))
    for listed in found:
        assert bool((listed.columns.diff(dim=1) > 0).all())
        for place, row in enumerate(listed.rows):
            assert torch.equal(whole(listed, place), expected[row])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), SAMPLINGS), min_size=1, max_size=5), st.integers(0, 2**32))
def test_decisions_are_those_of_whole_rows(rows: list[tuple[str, SamplingParameters]], seed: int) -> None:
    rows = [(kind, sampling) for kind, sampling in rows if kind != "impossible"]
    logits = rows_of(["peaked", *(kind for kind, _ in rows)], seed)
    logits[:, 5].clamp_(min=-1e3)  # so that every row has a possible token
    greedy = DecisionContext(SamplingParameters(temperature=0.0), (1,), 1)
    contexts = [greedy, *(DecisionContext(sampling, (1,) * (1 + seed % 9), 1) for _, sampling in rows)]
    expected = []
    for row, context in enumerate(contexts):
        scores = warp(logits[row : row + 1], [context])[0]
        if not context.is_greedy:
            scores = scores + gumbel([context.sampling.seed], [context.position], 0, SIZE, "cpu")[0]
        expected.append(int(scores.argmax()))
    assert decide(logits, contexts) == expected


def test_few_rows_need_more_than_the_leading_tokens() -> None:
    logits = rows_of(["peaked"] * 20 + ["equal"], 1)
    samplings = [(row, SamplingParameters(top_p=0.9)) for row in range(21)]
    found, others = shortlists(logits, samplings)
    assert [listed.columns.shape[1] for listed in found] == list(WIDTHS)
    assert sum(len(listed.rows) for listed in found) == 20
    assert [row for row, _ in others] == [20]


def test_a_nucleus_with_an_uncertain_edge_is_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide error bounds make every row be counted exactly, and the kept sets stay equal."""
    logits = rows_of(["peaked"] * 10, 2)
    samplings = [(row, SamplingParameters(top_p=0.7)) for row in range(10)]
    expected, _ = shortlists(logits, samplings)
    monkeypatch.setattr(shortlist, "_SLACK", 0.5)
    found, _ = shortlists(logits, samplings)
    assert [listed.rows for listed in found] == [listed.rows for listed in expected]
    for listed, other in zip(found, expected, strict=True):
        assert torch.equal(listed.logits, other.logits)
        assert torch.equal(listed.columns, other.columns)


def test_the_estimate_of_the_mass_is_within_its_bounds() -> None:
    gaps = torch.linspace(-40, 0, 200_001)
    exact = truncate.relative_masses(gaps).double()
    about = gaps.exp().double() * 2.0**truncate.UNIT_BITS
    assert bool(((exact - about).abs() <= about * (shortlist._SLACK / 2) + shortlist._SLACK_UNITS).all())


def test_a_small_vocabulary_is_truncated_without_a_short_list() -> None:
    rows = [(0, SamplingParameters(top_k=2))]
    assert shortlists(torch.zeros(1, 20), rows) == ([], rows)
