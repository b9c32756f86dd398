"""The growing tree: what is sent is the best of it, what is committed stays, and nothing goes through twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import pytest

from cluster.core.config import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, ROOT, TokenTree
from cluster.core.verification import RowFaultCode
from tests.support.fake_expander import SURE, FakeExpander, continued, ranked
from workers.draft.expansion.draft_tree import Guess
from workers.draft.expansion.drafter import GrowingDrafter
from workers.draft.expansion.expander import Place
from workers.draft.expansion.settings import ExpansionSettings

PROMPT = (1, 2, 3, 4, 5)
GREEDY = SamplingParameters(temperature=0.0)
BUDGET = DraftBudget(8, 4)

Mode = Literal["serial", "run_ahead", "enumerate"]


class Swimmer:
    """A drafter over the fake model, and the sequence that it is asked about."""

    def __init__(
        self,
        mode: Mode = "serial",
        blocks: int = 100,
        max_context_len: int = 1000,
        sure: Sequence[float] = SURE,
        lookup: Literal["off", "on"] = "off",
        **changes: int,
    ) -> None:
        self.expander = FakeExpander(blocks, max_context_len, sure)
        self.now = 0.0
        settings, draft = ExpansionSettings(mode=mode, **changes), DraftSection(max_nodes=16, max_depth=8)
        self.drafter = GrowingDrafter(self.expander, settings, draft, has_lookup=lookup == "on", clock=lambda: self.now)
        self.tokens: dict[str, list[int]] = {}

    def ask(self, name: str = "a", *committed: int, budget: DraftBudget = BUDGET) -> Proposal:
        return self.ask_all([name], {name: committed}, budget)[0]

    def ask_all(
        self, names: Sequence[str], committed: dict[str, Sequence[int]] | None = None, budget: DraftBudget = BUDGET
    ) -> tuple[Proposal, ...]:
        rows = []
        for name in names:
            new = tuple((committed or {}).get(name, ()))
            start = None
            if name not in self.tokens:
                self.tokens[name] = []
                new = new or PROMPT
                start = SequenceStart(len(new), GREEDY)
            self.tokens[name] += new
            rows.append(DraftRow(SequenceId(name), len(self.tokens[name]), new, budget, start))
        self.expander.passes.clear()
        return self.drafter.propose(rows)

    def grow(self, most: int = 100) -> int:
        self.expander.passes.clear()
        return sum(self.drafter.grow() for _ in range(most))

    @property
    def gone_through(self) -> int:
        """Tokens in the passes of the last call."""
        return sum(sum(widths) for widths in self.expander.passes)


@pytest.fixture
def serial() -> Iterator[Swimmer]:
    made = Swimmer()
    yield made
    made.drafter.close()
    assert made.expander.memory.blocks_held == 0


# --- one proposal -----------------------------------------------------------------------------


def test_the_first_guesses_are_what_the_model_would_write(serial: Swimmer) -> None:
    proposal = serial.ask(budget=DraftBudget(16, 4))
    tree, node = proposal.tree, ROOT
    for token in continued(PROMPT, 4):
        child = tree.child(node, token)
        assert child is not None
        node = child


def test_every_path_of_the_tree_is_one_that_the_model_guesses(serial: Swimmer) -> None:
    tree = serial.ask(budget=DraftBudget(16, 8)).tree
    assert len(tree) == 16
    for node, parent in enumerate(tree.parents):
        before = (*PROMPT, *tree.path_tokens(parent))
        assert tree.tokens[node] in ranked(before)


def test_the_likeliest_nodes_are_sent_and_none_is_likelier_than_its_parent(serial: Swimmer) -> None:
    proposal = serial.ask()
    assert len(proposal.probabilities) == len(proposal.tree) == 8
    for node, parent in enumerate(proposal.tree.parents):
        above = 1.0 if parent == ROOT else proposal.probabilities[parent]
        assert 0.0 <= proposal.probabilities[node] <= above
    smaller = serial.ask(budget=DraftBudget(3, 4))
    assert sorted(smaller.probabilities) == sorted(proposal.probabilities)[-3:]


def test_each_node_is_followed_by_its_likeliest_child(serial: Swimmer) -> None:
    tree = serial.ask(budget=DraftBudget(16, 4)).tree
    assert tree.tokens[:3] == tuple(continued(PROMPT, 3))
    assert tree.parents[:3] == (-1, 0, 1)


def test_one_candidate_makes_a_chain(serial: Swimmer) -> None:
    chain = Swimmer(sure=[0.9])
    proposal = chain.ask(budget=DraftBudget(6, 8))
    assert proposal.tree == TokenTree.chain(continued(PROMPT, 6))
    assert [len(widths) for widths in chain.expander.passes] == [1] * 6


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_tree_is_no_deeper_than_asked_and_takes_no_more_passes(serial: Swimmer, depth: int) -> None:
    assert serial.ask(budget=DraftBudget(16, depth)).tree.depth() <= depth
    assert len(serial.expander.passes) <= depth


def test_a_pass_expands_no_more_nodes_of_a_tree_than_its_width() -> None:
    swimmer = Swimmer(width=2)
    swimmer.ask(budget=DraftBudget(16, 8))
    assert max(len(widths) for widths in swimmer.expander.passes) == 2


def test_sequences_share_their_passes(serial: Swimmer) -> None:
    together = serial.ask_all("abc")
    assert len(serial.expander.passes) <= BUDGET.max_depth
    assert [proposal.tree for proposal in together] == [Swimmer().ask().tree] * 3


def test_guessing_ends_with_the_models_own_context() -> None:
    swimmer = Swimmer(max_context_len=len(PROMPT) + 1)
    assert swimmer.ask().tree.depth() == 2
    assert swimmer.ask("a", 1, 1).tree == EMPTY_TREE


def test_a_repeated_row_repeats_its_proposal(serial: Swimmer) -> None:
    before = serial.ask()
    again = serial.ask()
    assert (again.tree, again.probabilities) == (before.tree, before.probabilities)
    assert (before.ready, again.ready) == (0, 8)
    assert serial.gone_through == 0


# --- commits ----------------------------------------------------------------------------------


def test_what_hangs_below_the_committed_path_is_kept_and_nothing_of_it_goes_through_again(serial: Swimmer) -> None:
    before = serial.ask(budget=DraftBudget(16, 4))
    accepted = continued(PROMPT, 2)
    after = serial.ask("a", *accepted, budget=DraftBudget(2, 2))
    assert after.ready == len(after.tree) == 2
    assert serial.gone_through == 0
    assert set(after.tree.tokens) <= set(before.tree.tokens)


def test_a_correction_that_was_among_the_guesses_takes_its_stored_subtree_along() -> None:
    swimmer = Swimmer("enumerate")
    swimmer.ask()
    swimmer.grow()
    correction = ranked(PROMPT)[1]
    proposal = swimmer.ask("a", correction, budget=DraftBudget(3, 1))
    assert proposal.tree.tokens == tuple(ranked((*PROMPT, correction)))
    assert (proposal.ready, swimmer.gone_through) == (3, 0)


def test_after_a_correction_that_nobody_guessed_only_it_goes_through(serial: Swimmer) -> None:
    serial.ask(budget=DraftBudget(16, 4))
    accepted = continued(PROMPT, 2)
    other = next(token for token in range(7) if token not in ranked((*PROMPT, *accepted)))
    serial.ask("a", *accepted, other)
    assert serial.expander.passes[0] == [1]


def test_after_full_acceptance_the_last_guess_and_the_bonus_token_go_through() -> None:
    chain = Swimmer(sure=[0.9])
    guesses = chain.ask(budget=DraftBudget(4, 4)).tree.tokens
    chain.ask("a", *guesses, *continued((*PROMPT, *guesses), 1))
    assert chain.expander.passes[0] == [2]


def test_a_row_that_was_overtaken_goes_back_and_its_successor_is_out_of_sync(serial: Swimmer) -> None:
    serial.ask()
    serial.ask("a", 1, 2)
    late = DraftRow(SequenceId("a"), len(PROMPT) + 1, (1,), BUDGET)
    assert serial.drafter.propose([late])[0].tree == Swimmer().ask("b", *PROMPT, 1).tree
    fault = serial.ask("a", 3).fault
    assert fault is not None
    assert (fault.code, fault.stored_len) == (RowFaultCode.OUT_OF_SYNC, len(PROMPT) + 1)


def test_a_start_with_other_parameters_is_guessed_for_anew(serial: Swimmer) -> None:
    serial.ask()
    start = SequenceStart(2, SamplingParameters(temperature=1.0, seed=3))
    serial.expander.passes.clear()
    proposal = serial.drafter.propose([DraftRow(SequenceId("a"), len(PROMPT), PROMPT, BUDGET, start)])[0]
    assert proposal.ready == 0
    assert serial.expander.passes[0] == [1]  # what is stored of the text serves both


def test_a_budget_of_nothing_only_commits(serial: Swimmer) -> None:
    assert serial.ask(budget=DraftBudget(0, 4)).tree == EMPTY_TREE
    assert serial.ask("a", 1, budget=DraftBudget(4, 0)).tree == EMPTY_TREE
    assert serial.gone_through == 0
    assert serial.ask("a", 1).tree == Swimmer().ask("b", *PROMPT, 1, 1).tree


# --- growth between calls ---------------------------------------------------------------------


def test_serial_trees_do_not_grow_between_calls(serial: Swimmer) -> None:
    serial.ask()
    assert serial.grow() == 0


def test_run_ahead_grows_below_the_leaves_of_what_was_sent_and_nowhere_else() -> None:
    chain = Swimmer("run_ahead", sure=[0.9])
    sent = chain.ask(budget=DraftBudget(3, 3)).tree
    assert chain.grow(most=4) == 4
    bonus = continued((*PROMPT, *sent.tokens), 1)
    after = chain.ask("a", *sent.tokens, *bonus, budget=DraftBudget(3, 3))
    assert (after.ready, chain.gone_through) == (3, 0)
    wide = Swimmer("run_ahead")
    wide.ask(budget=DraftBudget(1, 1))
    wide.grow()
    correction = wide.ask("a", ranked(PROMPT)[1], budget=DraftBudget(1, 1))
    assert correction.ready == 0


def test_enumeration_grows_off_what_was_sent_as_well() -> None:
    swimmer = Swimmer("enumerate")
    swimmer.ask(budget=DraftBudget(1, 1))
    assert swimmer.grow() > 0
    for correction in ranked(PROMPT)[:2]:
        again = Swimmer("enumerate")
        again.ask(budget=DraftBudget(1, 1))
        again.grow()
        assert again.ask("a", correction, budget=DraftBudget(2, 1)).ready == 2


def test_growth_is_bounded_and_ends() -> None:
    swimmer = Swimmer("enumerate", sure=[0.99])
    swimmer.ask()
    assert swimmer.grow(most=1000) <= 64
    assert swimmer.grow() == 0


def test_growth_serves_the_likeliest_of_all_sequences_first() -> None:
    swimmer = Swimmer("enumerate")
    swimmer.ask_all("abc")
    assert swimmer.grow(most=1) == 1
    assert len(swimmer.expander.passes[0]) == 8


def test_growth_leaves_room_and_takes_nothing_from_others() -> None:
    swimmer = Swimmer("enumerate", blocks=16)
    swimmer.ask()
    swimmer.grow()
    assert swimmer.expander.memory.blocks_free >= 1
    assert swimmer.grow() == 0


def test_a_long_prompt_goes_through_between_calls_in_every_mode_once_it_was_committed() -> None:
    swimmer = Swimmer("serial")
    prompt = tuple(position % 7 for position in range(150))
    swimmer.ask("a", *prompt, budget=DraftBudget(0, 0))
    assert swimmer.grow() == 3
    assert [sum(widths) for widths in swimmer.expander.passes] == [64, 64, 21]
    swimmer.ask()
    assert swimmer.expander.passes[0] == [1]


def test_what_was_told_is_learned_piece_by_piece_and_nothing_else() -> None:
    swimmer = Swimmer("enumerate")
    swimmer.ask("b")  # would grow on
    prompt = tuple(position % 7 for position in range(150))
    swimmer.ask("a", *prompt, budget=DraftBudget(0, 0))
    names = [SequenceId("a"), SequenceId("unknown")]
    assert [swimmer.drafter.learn(names) for _ in range(5)] == [True, True, True, False, False]
    assert [sum(widths) for widths in swimmer.expander.passes] == [64, 64, 21]
    swimmer.ask("a")
    assert swimmer.expander.passes[0] == [1]


def test_what_does_not_fit_is_not_learned() -> None:
    swimmer = Swimmer("serial", blocks=4)
    prompt = tuple(position % 7 for position in range(150))
    swimmer.ask("a", *prompt, budget=DraftBudget(0, 0))
    while swimmer.drafter.learn([SequenceId("a")]):
        pass
    assert swimmer.expander.memory.blocks_free
    assert not swimmer.ask("a").tree


def test_growth_after_a_release_or_a_commit_finds_nothing_stale() -> None:
    swimmer = Swimmer("enumerate")
    swimmer.ask_all("ab")
    swimmer.grow(most=2)
    swimmer.drafter.release([SequenceId("a")])
    swimmer.grow()
    swimmer.drafter.release([SequenceId("b")])
    assert swimmer.grow() == 0
    assert swimmer.expander.memory.blocks_held == 0


def test_growth_that_fails_leaves_everything_as_it_was() -> None:
    swimmer = Swimmer("enumerate")
    swimmer.ask()
    held = swimmer.expander.memory.blocks_held
    swimmer.expander.failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        swimmer.drafter.grow()
    assert swimmer.expander.memory.blocks_held == held
    swimmer.expander.failing = False
    swimmer.ask("a", *continued(PROMPT, 3))
    assert swimmer.grow() > 0


# --- what is worth waiting for ----------------------------------------------------------------


@pytest.mark.parametrize(("pass_seconds", "depth"), [(0.009, 1), (0.001, 3)])
def test_a_full_budget_grows_further_only_where_the_target_would_not_have_been_faster(
    pass_seconds: float, depth: int
) -> None:
    """Tokens come at one per 10 ms: a pass of 9 ms must gain 0.9 tokens, which it cannot; one of 1 ms must gain 0.1."""
    swimmer = Swimmer()
    expand = swimmer.expander.expand

    def slow(places: Sequence[Place]) -> list[tuple[Guess, ...]]:
        swimmer.now += pass_seconds
        return expand(places)

    swimmer.expander.expand = slow  # type: ignore[method-assign]
    for _ in range(20):
        begun = swimmer.now
        committed = continued(swimmer.tokens["a"], 9)[:1] if swimmer.tokens else ()
        proposal = swimmer.ask("a", *committed, budget=DraftBudget(3, 8))
        swimmer.now = max(swimmer.now, begun + 0.01)
    assert proposal.tree.depth() == depth
