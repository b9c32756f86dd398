"""Prompt lookup against a scan of the whole context."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.draft.ngram import LOOKS_PER_CANDIDATE, NgramDrafter, NgramSettings

NAME = SequenceId("a")
ROOMY = DraftBudget(16, 4)


DRAFT = DraftSection(max_nodes=16, max_depth=4)


def whole(tokens: Sequence[int], budget: DraftBudget = ROOMY) -> DraftRow:
    return DraftRow(NAME, len(tokens), tuple(tokens), budget, SequenceStart(1, SamplingParameters()))


def tree(tokens: Sequence[int], budget: DraftBudget = ROOMY, **settings: int) -> TokenTree:
    return NgramDrafter(NgramSettings(**settings), DRAFT).propose([whole(tokens, budget)])[0].tree


def scan(tokens: Sequence[int], settings: NgramSettings, draft: DraftSection, budget: DraftBudget) -> TokenTree:
    """The definition of prompt lookup: longest suffix first, latest match first, and repetitions continue."""
    max_nodes = min(budget.max_nodes, draft.max_nodes)
    depth = min(budget.max_depth, draft.max_depth, max_nodes)
    found: list[tuple[int, ...]] = []
    for size in range(min(settings.max, len(tokens)), settings.min - 1, -1):
        suffix = list(tokens[len(tokens) - size :])
        ends = [end for end in range(len(tokens) - 1, size - 1, -1) if list(tokens[end - size : end]) == suffix]
        for end in ends[: LOOKS_PER_CANDIDATE * settings.candidates]:
            repeated = list(tokens)
            while len(repeated) < end + depth:
                repeated.append(repeated[end + (len(repeated) - len(tokens))])
            continuation = tuple(repeated[end : end + depth])
            if continuation not in found:
                found.append(continuation)
    return TokenTree.from_candidates(found[: settings.candidates] if depth else [], max_nodes)


def test_tokens_that_followed_the_same_suffix_are_proposed() -> None:
    assert tree([1, 2, 3, 4, 5, 6, 7, 1, 2]) == TokenTree.chain([3, 4, 5, 6])


def test_the_latest_match_comes_first() -> None:
    assert tree([1, 2, 3, 3, 3, 1, 2, 4, 4, 4, 1, 2], candidates=1).tokens[0] == 4


def test_a_longer_match_comes_before_a_later_one() -> None:
    assert tree([9, 1, 2, 3, 3, 3, 1, 2, 4, 4, 4, 9, 1, 2], candidates=1).tokens[0] == 3


def test_several_continuations_merge_into_one_tree() -> None:
    drafted = tree([1, 2, 3, 4, 7, 1, 2, 3, 5, 7, 1, 2], DraftBudget(16, 3))
    assert drafted == TokenTree.from_candidates([(3, 5, 7), (3, 4, 7)], 16)


def test_shorter_suffixes_fill_the_rest_of_the_tree() -> None:
    tokens = [8, 2, 5, 5, 1, 2, 3, 3, 1, 2]
    assert tree(tokens, DraftBudget(16, 2), min=1, max=2).candidates() == ((3, 3), (5, 5))


def test_a_repetition_continues_beyond_the_end_of_the_context() -> None:
    assert tree([7, 1, 2, 1, 2], candidates=1) == TokenTree.chain([1, 2, 1, 2])


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3, 4], [1, 2, 1]])
def test_without_a_match_the_tree_is_empty(tokens: list[int]) -> None:
    assert tree(tokens) == EMPTY_TREE


edits = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 2), max_size=8)), min_size=1, max_size=8
)  # tokens removed, tokens added
settings = st.builds(NgramSettings, min=st.integers(1, 2), max=st.integers(2, 4), candidates=st.integers(1, 4))
drafts = st.builds(DraftSection, max_nodes=st.integers(0, 12), max_depth=st.just(4))


@given(edits, settings, drafts, st.builds(DraftBudget, st.integers(0, 12), st.integers(0, 5)))
def test_after_any_edits_the_index_finds_the_same_as_a_scan(
    changes: list[tuple[int, list[int]]], configured: NgramSettings, draft: DraftSection, budget: DraftBudget
) -> None:
    drafter = NgramDrafter(configured, draft)
    tokens = [0]
    drafter.propose([whole(tokens)])
    for taken, added in changes:
        known_len = max(1, len(tokens) - taken)
        tokens = tokens[:known_len] + added
        proposal = drafter.propose([DraftRow(NAME, len(tokens), tuple(added), budget)])[0]
        assert proposal.fault is None
        assert (proposal.base_len, proposal.tree) == (len(tokens), scan(tokens, configured, draft, budget))


class TestSource:
    """What an encoder reads is searched too: corrections and summaries copy from it."""

    SOURCE = (20, 21, 22, 23, 24, 2)

    def tree(self, tokens: Sequence[int], **settings: int) -> TokenTree:
        start = SequenceStart(1, SamplingParameters(), source=self.SOURCE)
        row = DraftRow(NAME, len(tokens), tuple(tokens), ROOMY, start)
        return NgramDrafter(NgramSettings(**settings), DRAFT).propose([row])[0].tree

    def test_tokens_that_follow_the_same_suffix_are_proposed(self) -> None:
        assert self.tree([0, 20, 21]) == TokenTree.chain([22, 23, 24, 2])
        assert self.tree([0, 23, 24]) == TokenTree.chain([2])
        assert self.tree([0, 24, 2]) == EMPTY_TREE

    def test_the_answer_comes_before_the_source_and_a_longer_match_before_both(self) -> None:
        assert self.tree([0, 21, 22, 7, 7, 21, 22], candidates=1) == TokenTree.chain([7, 7, 21, 22])
        assert self.tree([0, 21, 22, 7, 7, 21, 22], candidates=2).tokens == (7, 7, 21, 22, 23, 24, 2)
        assert self.tree([0, 21, 22, 7, 20, 21, 22], candidates=1) == TokenTree.chain([23, 24, 2])
