"""Draft trees between calls: committed tokens are computed and probable nodes are expanded, as the mode allows."""

from __future__ import annotations

import pytest

from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from tests.support.engines.tree_drafter import PROMPT, DrafterHarness
from tests.support.fakes.fake_expander import continued, ranked


def test_serial_mode_does_not_expand_between_calls(serial: DrafterHarness) -> None:
    serial.propose()
    assert serial.run_ahead() == 0


def test_run_ahead_mode_expands_below_the_leaves_of_the_proposal_and_nowhere_else() -> None:
    chain = DrafterHarness("run_ahead", confidences=[0.9])
    sent = chain.propose(budget=DraftBudget(3, 3)).tree
    assert chain.run_ahead(most=4) == 4
    bonus = continued((*PROMPT, *sent.tokens), 1)
    after = chain.propose("a", *sent.tokens, *bonus, budget=DraftBudget(3, 3))
    assert (after.ready, chain.tokens_computed) == (3, 0)
    wide = DrafterHarness("run_ahead")
    wide.propose(budget=DraftBudget(1, 1))
    wide.run_ahead()
    correction = wide.propose("a", ranked(PROMPT)[1], budget=DraftBudget(1, 1))
    assert correction.ready == 0


def test_enumerate_mode_expands_off_the_proposed_paths_as_well() -> None:
    harness = DrafterHarness("enumerate")
    harness.propose(budget=DraftBudget(1, 1))
    assert harness.run_ahead() > 0
    for correction in ranked(PROMPT)[:2]:
        again = DrafterHarness("enumerate")
        again.propose(budget=DraftBudget(1, 1))
        again.run_ahead()
        assert again.propose("a", correction, budget=DraftBudget(2, 1)).ready == 2


def test_run_ahead_expansion_is_bounded_and_ends() -> None:
    harness = DrafterHarness("enumerate", confidences=[0.99])
    harness.propose()
    assert harness.run_ahead(most=1000) <= 64
    assert harness.run_ahead() == 0


def test_run_ahead_expansion_takes_the_most_probable_nodes_of_all_sequences_first() -> None:
    harness = DrafterHarness("enumerate")
    harness.propose_all("abc")
    assert harness.run_ahead(most=1) == 1
    assert len(harness.expander.passes[0]) == 8


def test_run_ahead_expansion_leaves_blocks_free_and_evicts_no_sequence() -> None:
    harness = DrafterHarness("enumerate", blocks=16)
    harness.propose()
    harness.run_ahead()
    assert harness.expander.memory.blocks_free >= 1
    assert harness.run_ahead() == 0


def test_a_long_committed_prompt_is_computed_between_calls_even_in_serial_mode() -> None:
    harness = DrafterHarness("serial")
    prompt = tuple(position % 7 for position in range(150))
    harness.propose("a", *prompt, budget=DraftBudget(0, 0))
    assert harness.run_ahead() == 3
    assert [sum(row_lengths) for row_lengths in harness.expander.passes] == [64, 64, 21]
    harness.propose()
    assert harness.expander.passes[0] == [1]


def test_catching_up_computes_committed_tokens_piece_by_piece_and_expands_nothing() -> None:
    harness = DrafterHarness("enumerate")
    harness.propose("b")  # its tree could be expanded further
    prompt = tuple(position % 7 for position in range(150))
    harness.propose("a", *prompt, budget=DraftBudget(0, 0))
    names = [SequenceId("a"), SequenceId("unknown")]
    assert [harness.drafter.catch_up(names) for _ in range(5)] == [True, True, True, False, False]
    assert [sum(row_lengths) for row_lengths in harness.expander.passes] == [64, 64, 21]
    harness.propose("a")
    assert harness.expander.passes[0] == [1]


def test_catching_up_stops_when_the_pool_is_full() -> None:
    harness = DrafterHarness("serial", blocks=4)
    prompt = tuple(position % 7 for position in range(150))
    harness.propose("a", *prompt, budget=DraftBudget(0, 0))
    while harness.drafter.catch_up([SequenceId("a")]):
        pass
    assert harness.expander.memory.blocks_free
    assert not harness.propose("a").tree


def test_run_ahead_expansion_after_a_release_finds_no_stale_node() -> None:
    harness = DrafterHarness("enumerate")
    harness.propose_all("ab")
    harness.run_ahead(most=2)
    harness.drafter.release([SequenceId("a")])
    harness.run_ahead()
    harness.drafter.release([SequenceId("b")])
    assert harness.run_ahead() == 0
    assert harness.expander.memory.blocks_held == 0


def test_a_failed_run_ahead_pass_changes_nothing() -> None:
    harness = DrafterHarness("enumerate")
    harness.propose()
    held = harness.expander.memory.blocks_held
    harness.expander.failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        harness.drafter.run_ahead()
    assert harness.expander.memory.blocks_held == held
    harness.expander.failing = False
    harness.propose("a", *continued(PROMPT, 3))
    assert harness.run_ahead() > 0
