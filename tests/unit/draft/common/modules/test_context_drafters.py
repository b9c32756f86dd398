"""Drafters that keep keys and values, row by row: their context survives cuts, gaps and repeated prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, Evidence, HiddenStates, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.core.request import SamplingParameters
from tests.unit.draft.conftest import DRAFT_VOCABULARY
from tests.unit.draft.rows import BUDGET, GREEDY, SAMPLED, SIZE, TAPS, draft, row, shown
from workers.draft.block.block_drafter import load_block_drafter
from workers.draft.common.modules.module_settings import ContextModuleSettings
from workers.draft.common.modules.ranked_paths import TreeForm
from workers.draft.eagle.eagle_drafter import load_eagle_drafter
from workers.draft.eagle.eagle_growth import GrowthLimits

Make = Callable[..., DraftMethod]


@pytest.fixture(params=["block", "eagle"])
def make(request: pytest.FixtureRequest, target: Path, modules: Path) -> Make:
    """Makes a drafter of each kind."""

    def create(**settings: object) -> DraftMethod:
        values = {"path": str(modules / request.param), "weights": "float32"} | settings
        section = TargetSection.model_validate({"path": str(target), "device": "cpu", "evidence": {"taps": TAPS}})
        parsed = ContextModuleSettings.model_validate(values)
        if request.param == "block":
            return load_block_drafter(parsed, DraftSection(), section, TreeForm(siblings=3))
        return load_eagle_drafter(parsed, DraftSection(), section, GrowthLimits(siblings=3, width=2))

    return create


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_arrives_piece_by_piece_gives_the_draft_of_the_whole(make: Make, sampling: SamplingParameters) -> None:
    whole = draft(make(), row(41, 0, [shown(0, 40)], sampling=sampling))
    pieces = draft(
        make(),
        row(9, 0, [shown(0, 8)], sampling=sampling, budget=DraftBudget(0, 0)),
        row(20, 9, [shown(8, 13), shown(13, 19)], sampling=sampling),
        row(41, 20, [shown(19, 40)], sampling=sampling),
    )
    assert pieces.tree == whole.tree and len(whole.tree) > 0
    assert set(whole.tree.tokens) <= set(DRAFT_VOCABULARY)


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
def test_a_batch_gives_the_drafts_of_single_rows(weights: str, make: Make) -> None:
    rows = [
        row(length, 0, [shown(begin, length - 1)], name=f"{length}", sampling=sampling, budget=budget)
        for length, begin, sampling, budget in (
            (12, 0, GREEDY, BUDGET),
            (60, 30, SAMPLED, DraftBudget(3, 2)),
            (33, 20, GREEDY, DraftBudget(1, 1)),
        )
    ]
    batch = [(found.tree, found.probabilities) for found in make(weights=weights).propose(rows)]
    alone = [make(weights=weights).propose([one])[0] for one in rows]
    assert batch == [(found.tree, found.probabilities) for found in alone]
    assert [len(tree) for tree, _ in batch][1:] == [3, 1]
    plain = [found.probabilities for found in make().propose(rows)]
    assert (plain == [probabilities for _, probabilities in batch]) == (weights == "float32")


def test_without_the_hidden_states_before_the_last_token_there_is_no_draft(make: Make) -> None:
    drafter = make()
    assert not len(draft(drafter, row(30, 0, [shown(0, 28)])).tree)
    assert len(draft(drafter, row(31, 30, [shown(29, 30)])).tree)  # position 28 stays unknown


def test_hidden_states_of_positions_that_are_not_committed_are_ignored(make: Make) -> None:
    expected = draft(make(), row(30, 0, [shown(0, 29)]))
    assert draft(make(), row(30, 0, [shown(0, 60)])).tree == expected.tree


def test_a_cut_sequence_is_drafted_for_as_if_it_had_never_been_longer(make: Make) -> None:
    drafter = make()
    draft(drafter, row(30, 0, [shown(0, 29)]))
    other = DraftRow(SequenceId("a"), 22, (91, 92), BUDGET, None, (shown(120, 121),))
    assert not len(drafter.propose([other])[0].tree)  # position 20 has another token now
    again = draft(drafter, row(25, 20, [shown(20, 24)]))
    assert again.tree == draft(make(), row(25, 0, [shown(0, 24)])).tree


@pytest.mark.parametrize("length", [199, 150, 60])
def test_a_sequence_that_is_shown_again_from_its_start_is_drafted_for_as_before(make: Make, length: int) -> None:
    """The target lost its memory and computes everything again, at once or in chunks."""
    drafter = make(store_tokens=0)
    draft(drafter, row(199, 0, [shown(0, 198)], budget=NO_DRAFT))
    again = draft(drafter, row(length, 0, [shown(0, length - 1)]))
    expected = draft(make(), row(length, 0, [shown(0, length - 1)]))
    assert again.probabilities == pytest.approx(expected.probabilities) and len(again.tree)


class TestStore:
    def test_a_repeated_prompt_is_drafted_for_with_its_whole_context(self, make: Make) -> None:
        """The target finds the first 32 tokens in its cache and shows only the rest."""
        drafter = make()
        expected = draft(drafter, row(40, 0, [shown(0, 39)]))
        drafter.release([SequenceId("a")])
        cached = row(40, 0, [shown(32, 39)], name="b")
        assert draft(drafter, cached).probabilities == pytest.approx(expected.probabilities)
        without = draft(make(store_tokens=0), cached)
        assert without.probabilities != pytest.approx(expected.probabilities) and len(without.tree)

    def test_a_sequence_that_forks_a_running_one_shares_its_context(self, make: Make) -> None:
        drafter = make()
        expected = draft(make(), row(40, 0, [shown(0, 39)]))
        draft(drafter, row(20, 0, [shown(0, 19)], budget=NO_DRAFT), row(40, 20, [shown(19, 39)]))
        fork = draft(drafter, row(40, 0, [shown(32, 39)], name="fork"))
        assert fork.probabilities == pytest.approx(expected.probabilities)

    def test_another_salt_finds_nothing(self, make: Make) -> None:
        drafter = make()
        expected = draft(drafter, row(40, 0, [shown(0, 39)], salt="one"))
        found = draft(drafter, row(40, 0, [shown(32, 39)], name="b", salt="two"))
        alone = draft(make(), row(40, 0, [shown(32, 39)]))
        assert found.probabilities == pytest.approx(alone.probabilities) != expected.probabilities

    def test_it_is_bounded(self, make: Make) -> None:
        drafter = make(store_tokens=32)
        draft(drafter, row(90, 0, [shown(60, 89)]), row(200, 0, [shown(0, 199)], name="b"))
        found = draft(drafter, row(90, 0, [shown(80, 89)], name="c"))
        alone = draft(make(), row(90, 0, [shown(80, 89)]))
        assert found.probabilities == pytest.approx(alone.probabilities)


def test_hidden_states_of_a_wrong_width_are_refused_and_other_rows_are_served(make: Make) -> None:
    wrong = Evidence(9, hidden=HiddenStates(0, SIZE, bytes(2 * SIZE * 8)))
    bad, good = make().propose([row(9, 0, [wrong]), row(9, 0, [shown(0, 8)], name="b")])
    assert bad.fault is not None and bad.fault.code is RowFaultCode.INVALID and "taps" in bad.fault.message
    assert good.fault is None and len(good.tree)


def test_more_sequences_than_are_kept_evict_the_least_recently_used_one(make: Make) -> None:
    drafter = make(sequences=2)
    for name in "abc":
        assert len(draft(drafter, row(9, 0, [shown(0, 8)], name=name)).tree)
    evicted = draft(drafter, row(10, 9, [shown(8, 9)], name="a"))
    assert evicted.fault is not None and evicted.fault.code is RowFaultCode.OUT_OF_SYNC
