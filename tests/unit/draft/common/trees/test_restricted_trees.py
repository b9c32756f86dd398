"""A draft tree has what the sequence's grammar permits, also where nodes were drafted before the grammar was known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.core.drafting import ANY_TOKENS, DraftBudget, DraftRow, NextTokens, Proposal
from cluster.core.ids import SequenceId
from tests.support.engines.tree_drafter import PROMPT, DrafterHarness
from tests.support.fakes.fake_expander import VOCABULARY, ranked

ROOMY = DraftBudget(16, 4)


def known(forced: Sequence[int] = (), allowed: Sequence[int] = ()) -> NextTokens:
    return NextTokens(tuple(forced), bytes(token in allowed for token in range(VOCABULARY)) if allowed else b"")


def propose(harness: DrafterHarness, next_tokens: NextTokens, tokens: Sequence[int] = PROMPT) -> Proposal:
    """The proposal of a sequence that the drafter knows up to the last of `tokens`, or not at all."""
    row = DraftRow(SequenceId("a"), len(tokens), (), ROOMY)
    if tokens == PROMPT:
        harness.propose(budget=ROOMY)
    return harness.drafter.propose([replace(row, next_tokens=next_tokens)])[0]


def first_tokens(found: Proposal) -> set[int]:
    return {token for token, depth in zip(found.tree.tokens, found.tree.depths(), strict=True) if depth == 1}


def test_candidates_that_were_drafted_earlier_and_are_excluded_are_gone(serial: DrafterHarness) -> None:
    best, second, third = ranked(PROMPT)
    found = propose(serial, known(allowed=(second, third)))
    assert first_tokens(found) == {second, third}
    assert best not in first_tokens(found)


def test_where_all_candidates_are_excluded_others_are_drafted(serial: DrafterHarness) -> None:
    others = set(range(VOCABULARY)) - set(ranked(PROMPT))
    found = propose(serial, known(allowed=tuple(others)))
    assert first_tokens(found)
    assert first_tokens(found) <= others


@pytest.mark.parametrize("mode", ["serial", "run_ahead", "enumerate"])
def test_tokens_that_are_allowed_alone_are_drafted_and_the_model_goes_on_after_them(mode: str) -> None:
    harness = DrafterHarness(mode)
    forced = tuple(token for token in range(VOCABULARY) if token not in ranked(PROMPT))[:2]
    harness.propose(budget=ROOMY)
    harness.run_ahead()
    found = propose(harness, known(forced))
    assert found.tree.tokens[:2] == forced
    assert found.probabilities[:2] == (1.0, 1.0)
    after = {token for token, depth in zip(found.tree.tokens, found.tree.depths(), strict=True) if depth == 3}
    assert after
    assert after <= set(ranked((*PROMPT, *forced)))
    harness.release_all()
    assert harness.expander.memory.blocks_held == 0


def test_a_token_that_is_allowed_alone_is_sure_where_the_text_has_it_too() -> None:
    harness = DrafterHarness(lookup="on")
    repeated = (1, 2, 3, 1, 2)
    harness.propose("a", *repeated, budget=ROOMY)
    found = propose(harness, known((3,)), repeated)
    assert found.tree.tokens[0] == 3
    assert found.probabilities[0] == 1.0


@pytest.mark.parametrize("forced", [(VOCABULARY,), (0, VOCABULARY, 1)])
@pytest.mark.parametrize("mode", ["serial", "enumerate"])
def test_a_token_that_the_model_does_not_have_does_not_go_through_it(mode: str, forced: tuple[int, ...]) -> None:
    harness = DrafterHarness(mode, vocabulary_size=VOCABULARY)
    found = propose(harness, known(forced))
    harness.run_ahead()
    assert first_tokens(found) == ({forced[0]} if forced[0] < VOCABULARY else set(ranked(PROMPT)))


def test_a_row_without_a_grammar_that_was_received_changes_no_tree() -> None:
    harness = DrafterHarness(confidences=())
    harness.propose(budget=ROOMY)
    harness.expander.passes.clear()
    assert NextTokens() is not ANY_TOKENS
    propose_again = DraftRow(SequenceId("a"), len(PROMPT), (), ROOMY, next_tokens=NextTokens())
    harness.drafter.propose([propose_again])
    assert not harness.expander.passes


def test_the_next_tokens_are_free_again_once_they_are_committed(serial: DrafterHarness) -> None:
    best, second, _ = ranked(PROMPT)
    propose(serial, known(allowed=(second,)))
    found = serial.propose("a", best, budget=ROOMY)
    assert first_tokens(found) == set(ranked((*PROMPT, best)))
    assert propose(serial, ANY_TOKENS, (*PROMPT, best)).tree == found.tree
