"""What a sequence was drafted last: repeated for the same budget, and learned from once."""

from __future__ import annotations

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from workers.draft.common.modules.path_trees import PathHistory, PathTrees, decision_contexts
from workers.draft.common.modules.ranked_paths import RankedPaths, TreeForm
from workers.draft.common.sessions import Session

START = SequenceStart(2, SamplingParameters(temperature=0.0))
RANKED = RankedPaths([[10, 11], [20, 21]], [[[0, 1]], [[0, 1]]], [[[0.6, 0.3]], [[0.6, 0.3]]])
BUDGET = DraftBudget(3, 2)


class Drafted(Session):
    """A sequence with its last draft."""

    def __init__(self) -> None:
        super().__init__(START)
        self.history = PathHistory()


def drafted() -> tuple[PathTrees, Drafted]:
    """A sequence of two tokens with its first draft."""
    trees, session = PathTrees(DraftSection(), 2, TreeForm(3)), Drafted()
    session.tokens = [5, 6]
    tree = trees.propose(DraftRow(SequenceId("a"), 2, (5, 6), BUDGET, START), BUDGET, session, RANKED).tree
    assert len(tree) == 3 and tree.path_tokens(0) == (10,)
    return trees, session


def test_a_budget_is_cut_to_the_settings_and_to_the_depths_of_the_module() -> None:
    trees = PathTrees(DraftSection(max_nodes=6, max_depth=5), 4, TreeForm(3))
    assert trees.within(DraftBudget(9, 9)) == DraftBudget(6, 4)
    assert trees.within(DraftBudget(2, 9)) == DraftBudget(2, 2)
    assert trees.within(DraftBudget(0, 3)) == DraftBudget(0, 0)


def test_the_last_proposal_is_repeated_for_the_same_budget_and_start_alone() -> None:
    trees, session = drafted()
    repeated = trees.repeated(session, BUDGET)
    assert repeated is not None and len(repeated.tree) == 3
    assert trees.repeated(session, DraftBudget(2, 2)) is None
    session.start = SequenceStart(2, SamplingParameters(temperature=1.0, seed=3))
    assert trees.repeated(session, BUDGET) is None


def test_committed_tokens_are_learned_from_once() -> None:
    trees, session = drafted()
    trees.observe(session)
    assert session.history.last is not None, "nothing was committed yet"
    session.tokens += [10, 21]
    trees.observe(session)
    assert session.history.last is None and not session.history.is_streak, "the last token was a second candidate"
    assert trees.repeated(session, BUDGET) is None
    session.history.is_streak = True
    trees.observe(session)
    assert session.history.is_streak, "there is no draft to learn from"


def test_each_sequence_has_a_context_for_each_depth() -> None:
    sessions = [Drafted(), Drafted()]
    sessions[1].tokens = [7]
    contexts = decision_contexts(sessions, 3)
    assert [len(one.tokens) for one in contexts] == [0, 1, 2, 1, 2, 3]
