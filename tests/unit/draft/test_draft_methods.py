"""The registry of drafting methods, and the method without drafts."""

from __future__ import annotations

import pytest

from cluster.core.config import DraftSection, TargetSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.tree import EMPTY_TREE
from workers.draft.registry import METHODS, create


def test_every_file_with_a_method_is_found() -> None:
    assert {"none", "ngram", "model", "synthetic"} <= set(METHODS.names())


def test_an_unknown_method_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigurationError, match=r"draft\.method: 'n-gram' is unknown.*the nearest is ngram"):
        create(DraftSection(method="n-gram"), TargetSection())


def test_a_name_cannot_be_taken_twice() -> None:
    assert "none" in METHODS.names()
    with pytest.raises(ValueError, match="'none' is registered twice"):
        METHODS.register("none", METHODS.get("ngram"))


def test_the_method_none_answers_every_row_with_the_empty_tree() -> None:
    method = create(DraftSection(method="none"), TargetSection())
    rows = [DraftRow(SequenceId(name), 9, (5,), DraftBudget(4, 4)) for name in "ab"]
    assert method.propose(rows) == tuple(Proposal(SequenceId(name), 9, EMPTY_TREE) for name in "ab")
    method.release([SequenceId("a")])
