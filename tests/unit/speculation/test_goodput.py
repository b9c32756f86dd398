"""Tree sizes by goodput: no nodes where they do not pay, the best nodes where they do."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.drafting import DraftBudget
from cluster.core.scheduling.allocation import clip_draft
from cluster.core.verification import StepSample
from cluster.speculation.goodput import DraftForecast, budget_for, prune_trees, size_trees
from cluster.speculation.latency import LatencyModel
from tests.support.fakes.simulated_time import StepTime, cpu_step, gpu_step


def known(step_time: StepTime) -> LatencyModel:
    sizes = itertools.product((1, 4, 8, 32), (1, 2, 4, 8, 16, 32, 64, 128, 256))
    return LatencyModel.of_profile(
        [StepSample(rows, tokens, step_time(rows, tokens)) for rows, tokens in sizes if tokens >= rows]
    )


FLAT = known(lambda rows, tokens: 0.010)
STEEP = known(lambda rows, tokens: 0.001 + 0.010 * tokens)


def mixture_step(rows: int, tokens: int) -> float:
    """A mixture with 8 of 64 experts for each token: a step reads those of all of its tokens, and little else."""
    return 0.001 + 0.001 * 64 * (1 - (1 - 8 / 64) ** tokens)


def growing(rows: int, size: int, seconds: float) -> LatencyModel:
    """Calls that take no time for size 0, after one sample."""
    model = LatencyModel(grows_from_zero=True)
    model.observe(rows, size, seconds)
    return model


FREE = LatencyModel(floor_seconds=1e-6)
EXPENSIVE = LatencyModel(floor_seconds=0.5)


def chain(acceptance: float, length: int = 8) -> DraftForecast:
    probabilities = tuple(acceptance**depth for depth in range(1, length + 1))
    return DraftForecast(probabilities, tuple(range(1, length + 1)), length)


@pytest.mark.parametrize("rows", [1, 4, 8, 32])
def test_no_nodes_are_asked_of_a_drafter_that_is_always_wrong(rows: int) -> None:
    sizes = size_trees([chain(0.0)] * rows, FLAT, FREE)
    assert sizes.nodes == (0,) * rows
    assert sizes.speedup == 1.0


@pytest.mark.parametrize("rows", [1, 8])
def test_no_nodes_are_asked_where_each_token_costs_as_much_as_it_gains(rows: int) -> None:
    assert size_trees([chain(0.9)] * rows, STEEP, FREE).nodes == (0,) * rows


def test_no_nodes_are_asked_of_a_drafter_that_takes_longer_than_it_saves() -> None:
    assert size_trees([chain(0.9)], FLAT, EXPENSIVE).nodes == (0,)


def test_all_nodes_are_asked_for_where_verification_is_free() -> None:
    assert size_trees([chain(0.5)] * 3, FLAT, FREE).nodes == (8, 8, 8)


def test_on_cpu_one_sequence_gets_a_tree_and_many_get_less_or_none() -> None:
    steps = known(cpu_step)
    sizes = [
        size_trees([chain(0.7)] * rows, steps, LatencyModel(floor_seconds=0.001)).nodes[0] for rows in (1, 4, 8, 32)
    ]
    assert sizes[0] >= 4
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


def test_with_a_mixture_of_experts_only_likely_drafts_pay() -> None:
    """The first drafted token reads 7 experts beside the last token's 8, so that its step takes 16 / 9 of the time."""
    likely = (0.6, 0.75, 0.8, 0.85, 0.9)
    forecasts = [chain(acceptance) for acceptance in likely]
    assert [size_trees([one], known(mixture_step), FREE).nodes[0] for one in forecasts] == [0, 0, 1, 2, 8]
    assert [size_trees([one], FLAT, FREE).nodes[0] for one in forecasts] == [8] * 5


def test_many_rows_touch_all_experts_so_more_tokens_cost_little_again() -> None:
    mixture = known(mixture_step)
    assert size_trees([chain(0.6)], mixture, FREE).nodes == (0,)
    assert min(size_trees([chain(0.6)] * 32, mixture, FREE).nodes) >= 4


def test_a_sequence_with_better_drafts_gets_more_nodes() -> None:
    nodes = size_trees([chain(0.9), chain(0.3), chain(0.02)], known(cpu_step), FREE).nodes
    assert nodes[0] > nodes[1] >= nodes[2] == 0


def test_a_deep_tree_is_not_worth_its_wait_where_a_shallow_one_is() -> None:
    waits = growing(1, 8, 0.016)
    shallow = size_trees([chain(0.8)], FLAT, waits).nodes[0]
    assert 1 <= shallow < 8
    assert size_trees([chain(0.8)], FLAT, FREE).nodes[0] == 8


def test_rows_without_drafts_count_in_the_time_of_plain_decoding() -> None:
    sizes = size_trees([chain(0.5)], known(cpu_step), FREE, rows=32)
    assert sizes.plain_goodput == pytest.approx(32 / cpu_step(32, 32), rel=0.02)


def test_a_budget_leaves_a_choice_and_stays_within_the_bounds() -> None:
    most = DraftBudget(8, 5)
    assert [clip_draft(budget_for(nodes, nodes), most, None, 100) for nodes in (1, 4, 8)] == [
        DraftBudget(2, 1),
        DraftBudget(6, 4),
        DraftBudget(8, 5),
    ]


# --- pruning -------------------------------------------------------------------------------


def test_all_nodes_stay_where_they_are_free_and_none_where_they_cost_what_they_gain() -> None:
    trees = [[0.6, 0.4], [0.1]]
    assert prune_trees(trees, FLAT, rows=2, tokens=2, waited=0.0).nodes == ((0, 1), (0,))
    assert prune_trees(trees, STEEP, rows=2, tokens=2, waited=0.0).nodes == ((), ())


def test_a_whole_tree_stays_only_if_all_its_nodes_together_pay() -> None:
    trees = [[0.6, 0.4], [0.9, 0.01, 0.01, 0.01]]
    assert prune_trees(trees, FLAT, rows=2, tokens=2, waited=0.0, whole={1}).nodes == ((0, 1), (0, 1, 2, 3))
    costly = known(lambda rows, tokens: 0.010 + 0.001 * tokens)
    assert prune_trees(trees, costly, rows=2, tokens=2, waited=0.0).nodes == ((0, 1), (0,))
    pruned = prune_trees(trees, costly, rows=2, tokens=2, waited=0.0, whole={1})
    assert pruned.nodes == ((0, 1), (0, 1, 2, 3))
    assert pruned.seconds == pytest.approx(costly.seconds(2, 8))
    assert pruned.expected == pytest.approx(3.93)
    steeper = known(lambda rows, tokens: 0.002 + 0.001 * tokens)
    assert prune_trees(trees, steeper, rows=2, tokens=2, waited=0.0, whole={1}).nodes == ((0,), ())


def test_more_nodes_stay_after_a_longer_wait() -> None:
    trees = [[0.5 * 0.8**node for node in range(8)]] * 4
    steps = known(cpu_step)
    impatient = prune_trees(trees, steps, rows=4, tokens=4, waited=0.0)
    patient = prune_trees(trees, steps, rows=4, tokens=4, waited=0.02)
    assert sum(map(len, impatient.nodes)) < sum(map(len, patient.nodes))


def test_pruning_no_trees_gives_no_trees() -> None:
    pruned = prune_trees([], FLAT, rows=3, tokens=3, waited=0.0)
    assert (pruned.nodes, pruned.expected) == ((), 3.0)


@st.composite
def trees(draw: st.DrawFn) -> list[list[float]]:
    """Acceptance probabilities of nodes whose parents come before them and are no less probable."""
    probability_trees = []
    for _ in range(draw(st.integers(0, 5))):
        probabilities: list[float] = []
        for _ in range(draw(st.integers(0, 8))):
            parent = draw(st.integers(-1, len(probabilities) - 1))
            probabilities.append(draw(st.floats(0, 1)) * (1.0 if parent < 0 else probabilities[parent]))
        probability_trees.append(probabilities)
    return probability_trees


latencies = st.sampled_from([FLAT, STEEP, known(cpu_step), known(gpu_step)])


@settings(deadline=None, max_examples=50)
@given(trees(), latencies, st.floats(0, 0.05))
def test_pruned_trees_are_never_worse_than_none_or_one_node_less_or_more(
    probability_trees: list[list[float]], steps: LatencyModel, waited: float
) -> None:
    rows = max(1, len(probability_trees))
    pruned = prune_trees(probability_trees, steps, rows, rows, waited)
    best = pruned.expected / (waited + pruned.seconds)
    count = sum(map(len, pruned.nodes))
    ranked = sorted((value for probabilities in probability_trees for value in probabilities), reverse=True)
    for other in {0, max(0, count - 1), min(len(ranked), count + 1), len(ranked)}:
        goodput = (rows + sum(ranked[:other])) / (waited + steps.seconds(rows, rows + other))
        assert best >= goodput * (1 - 1e-9)


@settings(deadline=None, max_examples=50)
@given(trees(), latencies)
def test_a_node_stays_only_with_its_parent(probability_trees: list[list[float]], steps: LatencyModel) -> None:
    # Chains: each node is the child of the one before.
    falling = [sorted(probabilities, reverse=True) for probabilities in probability_trees]
    rows = max(1, len(probability_trees))
    for nodes in prune_trees(falling, steps, rows, rows, 0.001).nodes:
        assert nodes == tuple(range(len(nodes)))


forecasts = st.lists(
    st.lists(st.floats(0, 0.99), max_size=8).map(
        lambda probabilities: DraftForecast(
            tuple(sorted(probabilities, reverse=True)), tuple(range(1, len(probabilities) + 1)), 8
        )
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=50)
@given(forecasts, latencies, st.sampled_from([FREE, EXPENSIVE, growing(2, 4, 0.004)]))
def test_expected_goodput_is_never_below_plain_decoding(
    some: list[DraftForecast], steps: LatencyModel, waits: LatencyModel
) -> None:
    sizes = size_trees(some, steps, waits)
    assert sizes.goodput >= sizes.plain_goodput
    assert all(count <= len(one.probabilities) for count, one in zip(sizes.nodes, some, strict=True))
    assert (sizes.goodput > sizes.plain_goodput) == any(sizes.nodes)


@settings(deadline=None, max_examples=50)
@given(forecasts, latencies)
def test_better_drafts_never_lower_the_expected_goodput(some: list[DraftForecast], steps: LatencyModel) -> None:
    better = [DraftForecast(tuple(min(1.0, 1.1 * value) for value in one.probabilities), one.depths, 8) for one in some]
    assert size_trees(better, steps, FREE).goodput >= size_trees(some, steps, FREE).goodput * (1 - 1e-9)
