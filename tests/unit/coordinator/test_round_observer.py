"""What the controller learns from a round: the gain of drafts without that of grammars, and nothing from prompts."""

from __future__ import annotations

import pytest

from cluster.coordinator.drafting.round_observer import RoundDrafts, RoundObserver
from cluster.coordinator.metrics import Metrics
from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import StepResult, Verdict, VerifyRow
from cluster.speculation.controller import SpeculationController

NAME = SequenceId("s")
CHAIN = TokenTree.chain((10, 11, 12))


class RecordingController(SpeculationController):
    """Records what it is told of rounds."""

    def __init__(self) -> None:
        super().__init__(DraftBudget(8, 8))
        self.plain: list[float] = []
        """Seconds of each round without drafts."""
        self.drafted: list[tuple[float, int]] = []
        """Seconds of each round with drafts, and the tokens that it committed."""
        self.lost: list[float] = []

    def observe_round(
        self, rows: int, tokens: int, seconds: float, *, waited: float, committed: int, is_drafted: bool
    ) -> None:
        if is_drafted:
            self.drafted.append((seconds + waited, committed))
        else:
            self.plain.append(seconds)

    def observe_lost(self, rows: int, seconds: float) -> None:
        self.lost.append(seconds)


def observed(
    tree: TokenTree, tokens: tuple[int, ...], drafts: RoundDrafts, pending: int = 1, names: tuple[int, ...] = ()
) -> RecordingController:
    """A round of 0.5 s with one row. The verdict decides `tokens`, and `names` those that a grammar forces next."""
    controller = RecordingController()
    row = VerifyRow(NAME, 9, tuple(range(pending)), tree)
    verdict = Verdict(NAME, 9, tokens, len(tree), forced=names)
    RoundObserver(controller, Metrics(), None).observe([row], drafts, 0.5, StepResult((verdict,), KvOccupancy(9, 9)))
    return controller


def test_a_draft_after_forced_tokens_counts_with_its_own_gain() -> None:
    drafts = RoundDrafts(asked=1, waited=0.1, forced={NAME: 2})
    found = observed(CHAIN, (10, 11, 12, 13), drafts)
    assert (found.drafted, found.plain, found.lost) == ([(0.5, 2)], [], [])


def test_a_draft_that_forced_tokens_replace_counts_as_one_without_gain() -> None:
    drafts = RoundDrafts(asked=1, waited=0.1, forced={NAME: 3})
    found = observed(CHAIN, (10, 11, 12, 13), drafts)
    assert (found.drafted, found.plain, found.lost) == ([(0.5, 1)], [], [])


def test_a_round_with_forced_tokens_alone_is_left_out() -> None:
    found = observed(CHAIN, (10, 11, 12, 13), RoundDrafts(forced={NAME: 3}))
    assert (found.drafted, found.plain, found.lost) == ([], [], [])


@pytest.mark.parametrize("names", [(), (20, 21)])
def test_a_round_that_names_forced_tokens_is_like_any_other(names: tuple[int, ...]) -> None:
    drafted = observed(CHAIN, (10, 11), RoundDrafts(asked=1, waited=0.1), names=names)
    assert (drafted.drafted, drafted.plain, drafted.lost) == ([(0.5, 2)], [], [])
    plain = observed(EMPTY_TREE, (10,), RoundDrafts(), names=names)
    assert (plain.drafted, plain.plain, plain.lost) == ([], [0.5], [])


def test_drafts_of_a_round_that_reads_a_prompt_are_lost_time() -> None:
    found = observed(EMPTY_TREE, (10,), RoundDrafts(asked=1, waited=0.1), pending=4)
    assert (found.drafted, found.plain, found.lost) == ([], [], [0.1])
