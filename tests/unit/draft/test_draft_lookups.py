"""What followed the same words before goes into the tree too: for nothing, and as far as it is believed."""

from __future__ import annotations

import pytest

from cluster.core.drafting import DraftBudget
from tests.support.fake_expander import continued
from tests.unit.draft.test_draft_expansion import Swimmer
from workers.draft.expansion.lookup_acceptance import Agreement, Lookups
from workers.draft.suffix_index import SuffixIndex

PHRASE = (1, 2, 3, 4, 5, 6, 0)


def index(*tokens: int) -> SuffixIndex:
    made = SuffixIndex(list(tokens), 2, 4)
    made.extend(0)
    return made


def test_the_longest_suffix_that_came_before_tells_what_is_next() -> None:
    assert index(1, 2, 3, 9, 2, 3, 7, 1, 2, 3).next_after([]) == (9, 3)
    assert index(1, 2, 3, 9, 2, 3, 7, 5, 2, 3).next_after([]) == (7, 2)
    assert index(1, 2, 3).next_after([]) is None


def test_a_path_below_the_text_is_looked_up_with_it() -> None:
    assert index(1, 2, 3, 9, 5).next_after([1, 2]) == (3, 2)
    assert index(4, 1, 2, 3, 9, 4, 1).next_after([2]) == (3, 3)


def test_a_repetition_goes_on_past_its_own_end() -> None:
    assert index(7, 8, 7, 8).next_after([7, 8]) == (7, 4)
    assert index(1, 5, 6).next_after([4, 5, 6]) == (4, 2)


def test_what_was_cut_is_not_found() -> None:
    tokens = [1, 2, 3, 4, 1, 2]
    made = SuffixIndex(tokens, 2, 4)
    made.extend(0)
    made.cut(3)
    tokens[3:] = [9, 1, 2]
    made.extend(3)
    assert made.next_after([]) == (3, 2)
    assert made.next_after([3]) == (9, 3)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_longer_matches_and_the_models_consent_are_believed_more(is_greedy: bool) -> None:
    lookups = Lookups()
    by_length = [lookups.chance(match, Agreement.UNASKED, is_greedy) for match in range(1, 12)]
    assert by_length == sorted(by_length) and by_length[0] < by_length[-1] < 1
    agreements = (Agreement.NONE, Agreement.LATER, Agreement.UNASKED, Agreement.FIRST)
    by_agreement = [lookups.chance(4, agreement, is_greedy) for agreement in agreements]
    assert by_agreement == sorted(by_agreement)


def test_what_commits_show_replaces_what_was_assumed() -> None:
    lookups = Lookups()
    for _ in range(500):
        lookups.observe(5, Agreement.NONE, True, hit=True)
        lookups.observe(6, Agreement.NONE, True, hit=False)
    assert lookups.chance(5, Agreement.NONE, True) > 0.95
    assert lookups.chance(6, Agreement.NONE, True) < 0.05
    assert lookups.chance(5, Agreement.NONE, False) == Lookups().chance(5, Agreement.NONE, False)


def test_a_phrase_that_came_before_is_guessed_to_its_full_depth_after_one_pass() -> None:
    swimmer = Swimmer(lookup="on")
    proposal = swimmer.ask("a", *PHRASE, *PHRASE, *PHRASE, 1, 2, budget=DraftBudget(5, 5))
    assert len(swimmer.expander.passes) <= 2
    assert proposal.tree.path_tokens(4)[:1] == (3,) or 3 in proposal.tree.tokens
    deepest = max(range(len(proposal.tree)), key=proposal.tree.depths().__getitem__)
    assert proposal.tree.path_tokens(deepest) == PHRASE[2:7]


def test_while_the_phrase_goes_on_no_pass_is_waited_for() -> None:
    swimmer = Swimmer(lookup="on")
    swimmer.ask("a", *PHRASE, *PHRASE, *PHRASE, 1, 2, budget=DraftBudget(4, 4))
    for turn in range(40):  # the target goes on with the phrase, a token beyond all that was guessed each time
        swimmer.now += 0.01
        place = 2 + 5 * turn
        proposal = swimmer.ask("a", *[PHRASE[(place + step) % 7] for step in range(5)], budget=DraftBudget(4, 4))
        assert len(proposal.tree) == 4
    assert swimmer.expander.passes == []
    assert proposal.tree.tokens == tuple(PHRASE[(place + 5 + step) % 7] for step in range(4))
    assert min(proposal.probabilities) > 0.8


def test_where_the_model_and_the_text_before_agree_there_is_one_node() -> None:
    swimmer = Swimmer(lookup="on")
    said = continued((1, 2, 3), 12)
    swimmer.ask("a", 1, 2, 3, *said, *(1, 2, 3), *said[:4], budget=DraftBudget(8, 4))
    tree = swimmer.drafter._sessions._sessions["a"].tree  # type: ignore[index]
    for node in (tree.root, *tree.nodes):
        tokens = [child.token for child in node.children]
        assert len(tokens) == len(set(tokens))
        assert sum(child.chance for child in node.children) <= 1 + 1e-9
