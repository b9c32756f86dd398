"""Looked-up tokens are added to the draft tree without a forward pass, with the measured probability of lookups."""

from __future__ import annotations

from random import Random

import pytest

from cluster.core.drafting import DraftBudget
from tests.support.engines.tree_drafter import DrafterHarness
from tests.support.fakes.counted_tokens import CountedTokens
from tests.support.fakes.fake_expander import continued
from workers.draft.common.suffix_index import SuffixIndex
from workers.draft.common.trees.lookup_acceptance import Agreement, LookupAcceptance

PHRASE = (1, 2, 3, 4, 5, 6, 0)


def index(*tokens: int) -> SuffixIndex:
    made = SuffixIndex(list(tokens), 2, 4)
    made.extend(0)
    return made


def test_the_last_occurrence_of_the_longest_suffix_is_found() -> None:
    assert index(1, 2, 3, 9, 2, 3, 7, 1, 2, 3).next_after([]) == (9, 3)
    assert index(1, 2, 3, 9, 2, 3, 7, 5, 2, 3).next_after([]) == (7, 2)
    assert index(1, 2, 3).next_after([]) is None


def test_a_drafted_path_is_part_of_the_suffix() -> None:
    assert index(1, 2, 3, 9, 5).next_after([1, 2]) == (3, 2)
    assert index(4, 1, 2, 3, 9, 4, 1).next_after([2]) == (3, 3)


def test_a_repetition_continues_beyond_the_end_of_the_text() -> None:
    assert index(7, 8, 7, 8).next_after([7, 8]) == (7, 4)
    assert index(1, 5, 6).next_after([4, 5, 6]) == (4, 2)


def searched(tokens: list[int], path: list[int], shortest: int, longest: int) -> tuple[int, int] | None:
    """What `next_after` returns, by a search through the whole text."""
    whole = [*tokens, *path]
    for size in range(min(longest, len(whole)), shortest - 1, -1):
        for end in range(len(tokens), size - 1, -1):
            if tokens[end - size : end] == whole[-size:]:
                if end < len(tokens):
                    return tokens[end], size
                if path:
                    return path[0], size
    return None


@pytest.mark.parametrize("seed", range(20))
def test_lookups_are_those_of_a_search_through_the_text(seed: int) -> None:
    random = Random(seed)
    tokens = random.choices(range(4), k=random.randrange(1, 60))
    for length in (0, 1, 2, 3, 4, 9, 30):
        path = random.choices(range(4), k=length)
        assert index(*tokens).next_after(path) == searched(tokens, path, 2, 4)


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_lookup_reads_as_much_of_a_long_text_and_of_a_long_path_as_of_short_ones(length: int) -> None:
    tokens, path = (CountedTokens(position % 7 for position in range(length)) for _ in range(2))
    made = SuffixIndex(tokens, 2, 4)
    made.extend(0)
    tokens.read = path.read = 0
    assert made.next_after(path) is not None
    assert tokens.read + path.read <= 6


def test_removed_tokens_are_not_found() -> None:
    tokens = [1, 2, 3, 4, 1, 2]
    made = SuffixIndex(tokens, 2, 4)
    made.extend(0)
    made.cut(3)
    tokens[3:] = [9, 1, 2]
    made.extend(3)
    assert made.next_after([]) == (3, 2)
    assert made.next_after([3]) == (9, 3)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_longer_matches_and_agreement_of_the_model_are_more_probable(is_greedy: bool) -> None:
    lookups = LookupAcceptance()
    by_length = [lookups.probability(match, Agreement.UNKNOWN, is_greedy) for match in range(1, 12)]
    assert by_length == sorted(by_length) and by_length[0] < by_length[-1] < 1
    agreements = (Agreement.ABSENT, Agreement.LATER, Agreement.UNKNOWN, Agreement.FIRST)
    by_agreement = [lookups.probability(4, agreement, is_greedy) for agreement in agreements]
    assert by_agreement == sorted(by_agreement)


def test_observations_replace_the_assumed_rates() -> None:
    lookups = LookupAcceptance()
    for _ in range(500):
        lookups.observe(5, Agreement.ABSENT, True, hit=True)
        lookups.observe(6, Agreement.ABSENT, True, hit=False)
    assert lookups.probability(5, Agreement.ABSENT, True) > 0.95
    assert lookups.probability(6, Agreement.ABSENT, True) < 0.05
    assert lookups.probability(5, Agreement.ABSENT, False) == LookupAcceptance().probability(5, Agreement.ABSENT, False)


def test_a_repeated_phrase_is_drafted_to_its_full_depth_after_two_passes() -> None:
    harness = DrafterHarness(lookup="on")
    proposal = harness.propose("a", *PHRASE, *PHRASE, *PHRASE, 1, 2, budget=DraftBudget(5, 5))
    assert len(harness.expander.passes) <= 2
    assert proposal.tree.path_tokens(4)[:1] == (3,) or 3 in proposal.tree.tokens
    deepest = max(range(len(proposal.tree)), key=proposal.tree.depths().__getitem__)
    assert proposal.tree.path_tokens(deepest) == PHRASE[2:7]


def test_while_a_phrase_repeats_no_pass_is_made_within_a_call() -> None:
    harness = DrafterHarness(lookup="on")
    harness.propose("a", *PHRASE, *PHRASE, *PHRASE, 1, 2, budget=DraftBudget(4, 4))
    for call in range(40):  # the target continues the phrase, one token beyond the draft each time
        harness.now += 0.01
        start = 2 + 5 * call
        proposal = harness.propose("a", *[PHRASE[(start + step) % 7] for step in range(5)], budget=DraftBudget(4, 4))
        assert len(proposal.tree) == 4
    assert harness.expander.passes == []
    assert proposal.tree.tokens == tuple(PHRASE[(start + 5 + step) % 7] for step in range(4))
    assert min(proposal.probabilities) > 0.8


def test_a_looked_up_token_that_is_also_a_candidate_is_one_node() -> None:
    harness = DrafterHarness(lookup="on")
    said = continued((1, 2, 3), 12)
    harness.propose("a", 1, 2, 3, *said, *(1, 2, 3), *said[:4], budget=DraftBudget(8, 4))
    tree = harness.drafter._sessions._sessions["a"].tree  # type: ignore[index]
    for node in (tree.root, *tree.nodes):
        tokens = [child.token for child in node.children]
        assert len(tokens) == len(set(tokens))
        assert sum(child.probability for child in node.children) <= 1 + 1e-9
