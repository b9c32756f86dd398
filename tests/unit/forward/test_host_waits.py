"""The host waits for the GPU once per step: a step has one synchronizing operation."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from cluster.core.request import SamplingParameters
from tests.support.engines.one_rank import group_of_one
from tests.support.fakes.host_waits import OnGpu
from workers.sampling import decide as deciding
from workers.sampling.acceptance import Accepted
from workers.sampling.candidates import candidates
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide
from workers.sampling.logprobs import token_logprobs
from workers.transfer import HostCopies
from workers.verify.decider import Decisions
from workers.verify.group_decider import GroupDecider
from workers.verify.verdicts import path_logprobs

VOCABULARY = 5000


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations of torch decide, also where `triton` is installed."""
    monkeypatch.setattr("workers.sampling.decide.has_triton", lambda: False)


def some_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def contexts(*samplings: SamplingParameters) -> list[DecisionContext]:
    return [DecisionContext(sampling, [5, 6, 7, 5, 9], 3) for sampling in samplings]


GREEDY = SamplingParameters(temperature=0.0)
DRAWN = SamplingParameters(temperature=0.8, seed=3)
CASES = {
    "greedy": [GREEDY] * 3,
    "drawn": [DRAWN] * 3,
    "both": [GREEDY, DRAWN, GREEDY],
    "top-k": [DRAWN, SamplingParameters(temperature=0.9, top_k=40, top_p=0.9, seed=4), GREEDY],
    "min-p": [SamplingParameters(temperature=1.2, min_p=0.05, seed=5), DRAWN],
    "penalties": [
        SamplingParameters(temperature=0.7, seed=6, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParameters(temperature=0.0, logit_bias=((17, 90.0),), presence_penalty=1.0),
    ],
}


@pytest.mark.parametrize("samplings", CASES.values(), ids=CASES)
def test_a_decision_synchronizes_once_and_equals_the_one_on_cpu(samplings: list[SamplingParameters]) -> None:
    logits = some_logits(len(samplings))
    expected = decide(logits, contexts(*samplings))
    decide(logits, contexts(*samplings))  # creates the cached tensors
    with OnGpu() as gpu:
        assert decide(logits, contexts(*samplings)) == expected
    assert gpu.waits == ["copies"]


def test_a_nucleus_without_another_bound_synchronizes_once_more() -> None:
    samplings = [SamplingParameters(temperature=temperature, top_p=0.95, seed=7) for temperature in (0.3, 5.0)]
    logits = some_logits(2)
    expected = decide(logits, contexts(*samplings))
    with OnGpu() as gpu:
        assert decide(logits[:1], contexts(samplings[0])) == expected[:1]
    assert gpu.waits == ["tolist", "copies"]
    with OnGpu():
        assert decide(logits, contexts(*samplings)) == expected


def test_nan_rows_are_found_without_another_synchronization() -> None:
    logits = some_logits(3)
    logits[1] = torch.nan
    with OnGpu() as gpu:
        found = decide(logits, contexts(GREEDY, DRAWN, DRAWN))
    assert [token == -1 for token in found] == [False, True, False]
    assert gpu.waits == ["copies"]


def test_equal_logits_at_the_edge_are_kept_as_on_cpu() -> None:
    logits = some_logits(2).round()  # many logits are equal
    samplings = [SamplingParameters(temperature=1.0, top_k=7, seed=seed) for seed in (1, 2)]
    expected = decide(logits, contexts(*samplings))
    with OnGpu():
        assert decide(logits, contexts(*samplings)) == expected


@pytest.fixture
def group() -> Iterator[GroupDecider]:
    """Decides with the other ranks, of which there is none."""
    model = SimpleNamespace(vocabulary_size=VOCABULARY, vocabulary_offset=0, tensor_parallel=1)
    with group_of_one("cpu"):
        yield GroupDecider(cast("Any", model), 0)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_the_vocabulary_synchronize_once(group: GroupDecider, name: str) -> None:
    """Rows that need the whole vocabulary are decided on the first rank, and arrive with all others."""
    asked = contexts(*CASES[name])
    logits = some_logits(len(asked))
    expected = decide(logits, asked)
    group.launch(logits, asked, HostCopies())  # creates the cached tensors
    with OnGpu() as gpu:
        assert group.launch(logits, asked, HostCopies()).tokens() == expected
    assert gpu.waits == ["copies"]


def test_ranks_find_rows_that_nobody_can_decide_without_another_wait(group: GroupDecider) -> None:
    logits = some_logits(3)
    expected = decide(logits, contexts(GREEDY, DRAWN, DRAWN))
    logits[1] = torch.nan
    with OnGpu() as gpu:
        found = group.launch(logits, contexts(GREEDY, DRAWN, DRAWN), HostCopies()).tokens()
    assert found == [expected[0], -1, expected[2]]
    assert gpu.waits == ["copies"]


@pytest.mark.parametrize("name", ["greedy", "drawn", "both", "penalties"])
def test_candidates_of_all_rows_synchronize_once_and_order_equal_scores_as_on_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many logits are equal, also at the edge; the rows are more than are scored at a time."""
    asked = contexts(*CASES[name])
    logits = some_logits(len(asked)).round()
    expected = candidates(logits, asked, 6)
    monkeypatch.setitem(deciding._CHUNK_ELEMENTS, "cpu", VOCABULARY)
    with OnGpu() as gpu:
        assert candidates(logits, asked, 6) == expected
    assert gpu.waits == ["copies"]


def test_the_log_probabilities_of_all_rows_synchronize_once() -> None:
    logits = some_logits(3).round()
    expected = token_logprobs(logits, [1, 2, 3], [5, 0, 2])
    with OnGpu() as gpu:
        assert token_logprobs(logits, [1, 2, 3], [5, 0, 2]) == expected
    assert gpu.waits == ["copies"]


def test_the_log_probabilities_of_all_paths_of_a_step_synchronize_once() -> None:
    """Some rows want none, and rank 0 alone has the logits of some."""
    logits = some_logits(8)
    decisions = Decisions([3, 4, 5, 6, 7, 8, 9, 10], {index: logits[index] for index in (0, 1, 2, 4, 5)})
    wanted = SamplingParameters(logprobs=2)
    listed = SamplingParameters(logprobs=0, logprob_token_ids=(11, 12, 13))
    paths = [
        (range(3), Accepted((1,), (3, 5)), wanted),
        (range(3, 4), Accepted((), (6,)), SamplingParameters()),
        (range(4, 6), Accepted((0,), (7, 8)), listed),
        (range(6, 8), Accepted((), (9,)), wanted),
        (range(8, 8), Accepted((), ()), wanted),
    ]
    with OnGpu() as gpu:
        found = path_logprobs(decisions, paths)
    assert gpu.waits == ["copies"]
    assert [[one.token for one in path] for path in found] == [[3, 5], [], [7, 8], [], []]
    assert found[0] == token_logprobs(logits[[0, 2]], [3, 5], [2, 2])
    assert found[2] == token_logprobs(logits[4:6], [7, 8], [0, 0], [(11, 12, 13)] * 2)
    assert {len(one.top) for one in found[2]} == {3}
