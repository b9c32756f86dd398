"""The drafter with heads: drafts where the target's hidden state is known, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, Evidence, HiddenStates, RowFaultCode
from cluster.core.errors import ConfigurationError, ModelLoadError
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import ROOT
from tests.support.engines.graph_replay import FakeRecorder
from tests.support.models import drafting_modules
from tests.support.models.drafting_evidence import shown_states
from workers.draft.common.learning import LearnsOnline, salt_key
from workers.draft.common.modules.ranked_paths import TreeForm
from workers.draft.heads import heads_drafter
from workers.draft.registry import METHODS, create, needs_of
from workers.model.draft_card import read_card
from workers.model.draft_shapes import HeadsShape
from workers.serve.configuration import load_configuration

BUDGET = DraftBudget(6, 3)
PROMPT = (5, 6, 7, 8)
HIDDEN = 48


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("heads")
    drafting_modules.save(target, directory, "heads", (2,), shape=HeadsShape(3, 16, 8))
    return directory


def configured(target: Path, heads: Path, method: str = "heads", learn: str = "off", **settings: Any) -> DraftMethod:
    configuration = load_configuration(
        {
            "target": {"path": str(target), "device": "cpu", "evidence": {"taps": (2,)}},
            "draft": {"method": method, "learn": learn, method: {"path": str(heads)} | settings},
        }
    )
    assert needs_of(configuration.draft).taps == (2,)
    return create(configuration.draft, configuration.target)


def evidence(first: int, tokens: int, seed: int = 0) -> tuple[Evidence, ...]:
    return (shown_states(torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)), first),)


def opening(name: str = "a", sampling: SamplingParameters | None = None, tokens: Sequence[int] = PROMPT) -> DraftRow:
    start = SequenceStart(len(PROMPT), sampling or SamplingParameters(temperature=0.0))
    return DraftRow(SequenceId(name), len(tokens), tuple(tokens), BUDGET, start, evidence(0, len(tokens) - 1))


def test_the_hidden_state_before_the_last_token_is_needed_and_may_come_before_the_budget(
    target: Path, heads: Path
) -> None:
    drafter = configured(target, heads)
    (complete,) = drafter.propose([opening()])
    assert len(complete.tree) == len(complete.probabilities) == BUDGET.max_nodes
    without = replace(opening("b"), evidence=())
    earlier = replace(opening("c"), evidence=evidence(0, 2))
    assert [len(proposal.tree) for proposal in drafter.propose([without, earlier])] == [0, 0]
    late = DraftRow(SequenceId("a"), 6, (9, 3), NO_DRAFT, evidence=evidence(3, 2))
    assert len(drafter.propose([late])[0].tree) == 0
    assert len(drafter.propose([replace(late, budget=BUDGET, evidence=())])[0].tree) == BUDGET.max_nodes


@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_a_row_has_the_same_draft_in_a_batch_and_alone(weights: str, target: Path, heads: Path) -> None:
    samplings = [SamplingParameters(temperature=0.0), SamplingParameters(temperature=0.9, top_p=0.9, seed=4)]
    rows = [opening(str(number), sampling) for number, sampling in enumerate(samplings)]
    together = configured(target, heads, weights=weights).propose(rows)
    alone = [configured(target, heads, weights=weights).propose([row])[0] for row in rows]
    assert [proposal.tree for proposal in together] == [proposal.tree for proposal in alone]
    assert together[0].tree != together[1].tree


def test_a_token_that_changes_makes_the_hidden_state_stale(target: Path, heads: Path) -> None:
    drafter = configured(target, heads)
    drafter.propose([opening()])
    changed = DraftRow(SequenceId("a"), 4, (9, 8), BUDGET)
    assert len(drafter.propose([changed])[0].tree) == 0
    last = DraftRow(SequenceId("b"), 4, (9,), BUDGET)
    drafter.propose([opening("b")])
    assert len(drafter.propose([last])[0].tree) == BUDGET.max_nodes  # the state is of the token before


def test_hidden_states_of_another_width_are_refused_and_others_are_served(target: Path, heads: Path) -> None:
    drafter = configured(target, heads)
    wrong = replace(opening("b"), evidence=(Evidence(1, hidden=HiddenStates(0, 32, bytes(64 * 3))),))
    good, bad = drafter.propose([opening(), wrong])
    assert len(good.tree) == BUDGET.max_nodes
    assert bad.fault is not None and bad.fault.code is RowFaultCode.INVALID


def test_the_methods_differ_in_the_form_of_the_tree(target: Path, heads: Path) -> None:
    chain = configured(target, heads, "blockwise").propose([opening()])[0].tree
    assert chain.is_chain and len(chain) == 3
    static = configured(target, heads, tree=[[0], [1], [0, 0], [2]]).propose([opening()])[0].tree
    assert sorted(static.parents) == [ROOT, ROOT, ROOT, 0]
    assert static.path_tokens(static.tokens.index(chain.tokens[0])) == chain.tokens[:1]


@pytest.mark.parametrize("kind", ["heads", "block"])
def test_the_tree_of_a_card_is_used_where_the_settings_have_none(target: Path, tmp_path: Path, kind: str) -> None:
    drafting_modules.save(target, tmp_path, kind, (2,))
    nodes = ((0,), (0, 0), (1,), (2,))
    replace(read_card(tmp_path), tree=nodes).write(tmp_path)

    def form(max_nodes: int, **settings: Any) -> Any:
        draft = {"method": kind, "max_nodes": max_nodes, kind: {"path": str(tmp_path)} | settings}
        section = load_configuration({"target": {"path": str(target)}, "draft": draft}).draft
        settings_of_kind: Any = section.settings(kind, METHODS.get(kind).settings)
        return settings_of_kind.form(section)

    assert form(4) == TreeForm(3, frozenset(nodes))
    assert form(2) == TreeForm(1, frozenset(nodes[:2]))
    assert form(5) == TreeForm(8)  # a tree of fewer nodes than may be drafted is not used
    assert form(4, tree="auto") == TreeForm(8)
    assert form(4, tree=[[0], [1]]) == TreeForm(2, frozenset({(0,), (1,)}))


def test_captured_passes_draft_with_the_weights_of_the_files_alone(
    target: Path, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, key = FakeRecorder(), salt_key("")
    monkeypatch.setattr(heads_drafter, "capture_of", lambda *_: recorder)
    drafter = configured(target, heads, learn="on")
    assert isinstance(drafter, LearnsOnline)
    weights = drafter.weights
    assert weights is not None
    expected = drafter.propose([opening("files")])[0].tree
    replayed = recorder.replayed
    assert replayed > 0
    weights.replace(key, {name: value.roll(1, 0) for name, value in weights.of(key).items()})
    assert drafter.propose([opening("learned")])[0].tree != expected
    assert recorder.replayed == replayed
    weights.replace(key, None)
    assert drafter.propose([opening("files again")])[0].tree == expected
    assert recorder.replayed > replayed


def test_settings_that_cannot_work_are_refused(target: Path, heads: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tree: \[0, 1\] needs its parent \[0\]"):
        configured(target, heads, tree=[[1], [0, 1]])
    with pytest.raises(ConfigurationError, match="path must be set"):
        configured(target, Path(), path="")
    drafting_modules.save(target, tmp_path, "block", (2,))
    with pytest.raises(ModelLoadError, match="kind is 'block'"):
        configured(target, tmp_path)
