"""The best candidates of a shortlist are those of the whole row."""

from __future__ import annotations

import pytest
import torch

from cluster.core.request import SamplingParameters
from workers.draft.common.modules.shortlist import Shortlist
from workers.forward.native.largest import Largest, largest_by_torch, load_largest
from workers.sampling.candidates import candidates
from workers.sampling.context import DecisionContext

GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=0.7, seed=3)
TRUNCATED = SamplingParameters(temperature=0.9, top_k=40, top_p=0.9, seed=5)


@pytest.fixture(scope="module", params=["kernel", "torch"])
def largest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Largest:
    """Both ways to find the largest logits."""
    if request.param == "torch":
        return largest_by_torch
    return load_largest(torch.device("cpu"), str(tmp_path_factory.mktemp("code")))


@pytest.mark.parametrize("size", [50, 1000, 8192])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_candidates_are_those_of_the_whole_row(size: int, count: int, largest: Largest) -> None:
    logits = 6.0 * torch.randn((3, size), generator=torch.Generator().manual_seed(size))
    vocabulary = 2 * torch.arange(size)
    for samplings in ((GREEDY,) * 3, (GREEDY, SAMPLED, TRUNCATED)):
        contexts = [DecisionContext(sampling, (0,) * (4 + row), 2) for row, sampling in enumerate(samplings)]
        shortlist = Shortlist(vocabulary, knows_noise=True, largest=largest)
        leading = shortlist.leading(logits, contexts, count)
        tokens, confidences = shortlist.tokens(leading.columns).tolist(), leading.confidences.tolist()
        for row, expected in enumerate(candidates(logits, contexts, count, vocabulary)):
            assert tokens[row][: len(expected)] == [one.token for one in expected]
            shares = [one.probability for one in expected]
            # The noise of tokens outside the shortlist is not drawn, so their small share is missing.
            assert confidences[row][: len(expected)] == pytest.approx(shares, rel=0.05, abs=1e-4)


def test_the_largest_logits_of_rows_with_infinities_and_no_numbers(largest: Largest) -> None:
    logits = torch.randn((4, 1000), generator=torch.Generator().manual_seed(1))
    logits[1, ::3], logits[2, 7], logits[3] = torch.nan, torch.inf, -torch.inf
    best, columns, totals = largest(logits, 5)
    cleaned = logits.nan_to_num(nan=-torch.inf, posinf=1e30, neginf=-torch.inf)
    assert torch.equal(best, cleaned.topk(5).values)
    assert torch.equal(cleaned.gather(1, columns), best)
    torch.testing.assert_close(totals[:3], cleaned[:3].logsumexp(dim=1, keepdim=True))


def test_without_the_noise_the_most_probable_token_is_first() -> None:
    logits = torch.randn((1, 4096), generator=torch.Generator().manual_seed(1))
    leading = Shortlist(None, knows_noise=False).leading(logits, [DecisionContext(SAMPLED, (0,), 1)], 2)
    assert leading.columns[0].tolist() == logits[0].topk(2).indices.tolist()


def test_a_row_without_any_candidate_has_no_confidence() -> None:
    logits = torch.full((2, 4096), float("-inf"))
    logits[1, 7] = 0.0
    leading = Shortlist(None, knows_noise=True).leading(logits, [DecisionContext(GREEDY, (0,), 1)] * 2, 2)
    assert leading.confidences.tolist() == [[0.0, 0.0], [1.0, 0.0]]
    assert leading.columns[1, 0] == 7
