"""How much is guessed: nothing where it does not pay, the best nodes where it does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.drafting import DraftBudget
from cluster.core.verification import StepSample
from cluster.speculation.goodput import Prospect, budget, choose, keep
from cluster.speculation.latency import Durations
from tests.support.simulated_time import Law, cpu_step, gpu_step


def known(law: Law) -> Durations:
    sizes = itertools.product((1, 4, 8, 32), (1, 2, 4, 8, 16, 32, 64, 128, 256))
    return Durations.of_profile(
        [StepSample(rows, tokens, law(rows, tokens)) for rows, tokens in sizes if tokens >= rows]
    )


FLAT = known(lambda rows, tokens: 0.010)
STEEP = known(lambda rows, tokens: 0.001 + 0.010 * tokens)
FREE = Durations(floor_seconds=1e-6)
DEAR = Durations(floor_seconds=0.5)


def chain(acceptance: float, length: int = 8) -> Prospect:
    chances = tuple(acceptance**depth for depth in range(1, length + 1))
    return Prospect(chances, tuple(range(1, length + 1)), length)


@pytest.mark.parametrize("rows", [1, 4, 8, 32])
def test_nothing_is_asked_of_a_drafter_that_is_always_wrong(rows: int) -> None:
    choice = choose([chain(0.0)] * rows, FLAT, FREE)
    assert choice.nodes == (0,) * rows
    assert choice.advantage == 1.0


@pytest.mark.parametrize("rows", [1, 8])
def test_nothing_is_asked_where_each_token_costs_as_much_as_it_can_bring(rows: int) -> None:
    assert choose([chain(0.9)] * rows, STEEP, FREE).nodes == (0,) * rows


def test_nothing_is_asked_of_a_drafter_that_takes_longer_than_it_saves() -> None:
    assert choose([chain(0.9)], FLAT, DEAR).nodes == (0,)


def test_all_is_asked_where_verification_is_free() -> None:
    assert choose([chain(0.5)] * 3, FLAT, FREE).nodes == (8, 8, 8)


def test_on_cores_a_lone_sequence_gets_a_tree_and_many_get_less_or_none() -> None:
    steps = known(cpu_step)
    sizes = [choose([chain(0.7)] * rows, steps, Durations(floor_seconds=0.001)).nodes[0] for rows in (1, 4, 8, 32)]
    assert sizes[0] >= 4
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


def test_who_is_guessed_well_gets_more_than_who_is_not() -> None:
    nodes = choose([chain(0.9), chain(0.3), chain(0.02)], known(cpu_step), FREE).nodes
    assert nodes[0] > nodes[1] >= nodes[2] == 0


def test_a_deep_tree_is_not_worth_its_wait_where_a_shallow_one_is() -> None:
    waits = Durations(grows_from_zero=True).learned(1, 8, 0.016)
    shallow = choose([chain(0.8)], FLAT, waits).nodes[0]
    assert 1 <= shallow < 8
    assert choose([chain(0.8)], FLAT, FREE).nodes[0] == 8


def test_rows_that_ask_for_nothing_make_the_step_and_the_plain_alternative_what_they_are() -> None:
    choice = choose([chain(0.5)], known(cpu_step), FREE, rows=32)
    assert choice.plain == pytest.approx(32 / cpu_step(32, 32), rel=0.02)


def test_what_is_asked_leaves_a_choice_and_keeps_the_bounds() -> None:
    most = DraftBudget(8, 5)
    assert [budget(nodes, nodes, most) for nodes in (0, 1, 4, 8)] == [
        DraftBudget(0, 0),
        DraftBudget(2, 1),
        DraftBudget(6, 4),
        DraftBudget(8, 5),
    ]


# --- what is kept -------------------------------------------------------------------------------


def test_all_guesses_are_kept_where_they_are_free_and_none_where_they_cost_all_they_bring() -> None:
    trees = [[0.6, 0.4], [0.1]]
    assert keep(trees, FLAT, rows=2, tokens=2, waited=0.0).nodes == ((0, 1), (0,))
    assert keep(trees, STEEP, rows=2, tokens=2, waited=0.0).nodes == ((), ())


def test_time_that_is_gone_makes_more_guesses_worth_their_place() -> None:
    trees = [[0.5 * 0.8**node for node in range(8)]] * 4
    steps = known(cpu_step)
    impatient = keep(trees, steps, rows=4, tokens=4, waited=0.0)
    patient = keep(trees, steps, rows=4, tokens=4, waited=0.02)
    assert sum(map(len, impatient.nodes)) < sum(map(len, patient.nodes))


def test_no_trees_are_no_trouble() -> None:
    kept = keep([], FLAT, rows=3, tokens=3, waited=0.0)
    assert (kept.nodes, kept.expected) == ((), 3.0)


@st.composite
def trees(draw: st.DrawFn) -> list[list[float]]:
    """Chances of nodes whose parents come before them and are no less likely."""
    grown = []
    for _ in range(draw(st.integers(0, 5))):
        chances: list[float] = []
        for _ in range(draw(st.integers(0, 8))):
            parent = draw(st.integers(-1, len(chances) - 1))
            chances.append(draw(st.floats(0, 1)) * (1.0 if parent < 0 else chances[parent]))
        grown.append(chances)
    return grown


laws = st.sampled_from([FLAT, STEEP, known(cpu_step), known(gpu_step)])


@settings(deadline=None, max_examples=50)
@given(trees(), laws, st.floats(0, 0.05))
def test_what_is_kept_is_never_worse_than_nothing_and_never_worse_than_one_node_less_or_more(
    grown: list[list[float]], steps: Durations, waited: float
) -> None:
    rows = max(1, len(grown))
    kept = keep(grown, steps, rows, rows, waited)
    best = kept.expected / (waited + kept.seconds)
    count = sum(map(len, kept.nodes))
    ranked = sorted((chance for chances in grown for chance in chances), reverse=True)
    for other in {0, max(0, count - 1), min(len(ranked), count + 1), len(ranked)}:
        goodput = (rows + sum(ranked[:other])) / (waited + steps.seconds(rows, rows + other))
        assert best >= goodput * (1 - 1e-9)


@settings(deadline=None, max_examples=50)
@given(trees(), laws)
def test_where_parents_are_likelier_a_kept_node_has_its_parent(grown: list[list[float]], steps: Durations) -> None:
    falling = [sorted(chances, reverse=True) for chances in grown]  # chains: each hangs under the one before
    for nodes in keep(falling, steps, max(1, len(grown)), max(1, len(grown)), 0.001).nodes:
        assert nodes == tuple(range(len(nodes)))


prospects = st.lists(
    st.lists(st.floats(0, 0.99), max_size=8).map(
        lambda chances: Prospect(tuple(sorted(chances, reverse=True)), tuple(range(1, len(chances) + 1)), 8)
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=50)
@given(prospects, laws, st.sampled_from([FREE, DEAR, Durations(grows_from_zero=True).learned(2, 4, 0.004)]))
def test_a_choice_never_promises_less_than_plain_decoding(
    some: list[Prospect], steps: Durations, waits: Durations
) -> None:
    choice = choose(some, steps, waits)
    assert choice.goodput >= choice.plain
    assert all(count <= len(one.chances) for count, one in zip(choice.nodes, some, strict=True))
    assert (choice.goodput > choice.plain) == any(choice.nodes)


@settings(deadline=None, max_examples=50)
@given(prospects, laws)
def test_guesses_that_are_likelier_promise_no_less(some: list[Prospect], steps: Durations) -> None:
    better = [Prospect(tuple(min(1.0, 1.1 * chance) for chance in one.chances), one.reach, 8) for one in some]
    assert choose(better, steps, FREE).goodput >= choose(some, steps, FREE).goodput * (1 - 1e-9)
