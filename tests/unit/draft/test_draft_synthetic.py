"""The synthetic drafter proposes the tokens that a synthetic target accepts, at the configured rates and cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, DraftRow
from cluster.core.errors import ConfigurationError, ModelLoadError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from workers.draft.common.trees.calibration import Calibration
from workers.draft.common.trees.tree_drafter import TreeDrafter
from workers.draft.registry import create
from workers.draft.synthetic import SyntheticExpander, SyntheticSettings
from workers.sampling.rules.synthetic import synthetic_token
from workers.serve.configuration import load_configuration

VOCABULARY = 50
SEED = 11
START = SequenceStart(3, SamplingParameters(seed=SEED))
PROMPT = (4, 5, 6)


class Slept:
    """A fake clock with a `sleep` that advances it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def drafter(slept: Slept, rates: tuple[float, ...] = (0.8,), mode: str = "serial") -> TreeDrafter:
    expander = SyntheticExpander(rates, 0.25, VOCABULARY, slept.sleep)
    settings = SyntheticSettings.model_validate({"mode": mode})
    return TreeDrafter(expander, settings, DraftSection(), clock=lambda: slept.now, calibration=Calibration(trust=1.0))


def row(tokens: tuple[int, ...], known: int = 0, nodes: int = 5) -> DraftRow:
    start = START if known == 0 else None
    return DraftRow(SequenceId("a"), len(tokens), tokens[known:], DraftBudget(nodes, nodes), start)


def drafted_chain(begin: int, count: int) -> tuple[int, ...]:
    return tuple(synthetic_token(SEED, begin + step, VOCABULARY) for step in range(count))


def test_drafts_are_the_chain_that_a_synthetic_target_may_accept() -> None:
    proposal = drafter(Slept()).propose([row(PROMPT)])[0]
    assert proposal.tree == TokenTree.chain(drafted_chain(3, 5))


def test_a_pass_takes_the_configured_time() -> None:
    slept = Slept()
    drafter(slept).propose([row(PROMPT)])
    assert slept.naps == [0.25] * 5


def test_probabilities_follow_the_rates_by_depth() -> None:
    proposal = drafter(Slept(), (0.8, 0.5)).propose([row(PROMPT, nodes=3)])[0]
    assert proposal.probabilities == pytest.approx((0.8, 0.4, 0.2))


def test_nodes_expanded_ahead_are_ready_after_full_acceptance() -> None:
    slept = Slept()
    ahead = drafter(slept, mode="run_ahead")
    ahead.propose([row(PROMPT, nodes=2)])
    for _ in range(3):
        assert ahead.run_ahead()
    slept.naps.clear()
    committed = (*PROMPT, *drafted_chain(3, 3))
    proposal = ahead.propose([row(committed, known=3, nodes=2)])[0]
    assert proposal.tree == TokenTree.chain(drafted_chain(6, 2))
    assert (proposal.ready, slept.naps) == (2, [])


def test_the_method_reads_the_vocabulary_size_from_the_targets_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCABULARY}))
    values = {"method": "synthetic", "synthetic": {"acceptance": (0.9,), "seconds": 0.0}}
    method = create(load_configuration({"draft": values}).draft, TargetSection(path=str(tmp_path)))
    assert method.propose([row(PROMPT)])[0].tree == TokenTree.chain(drafted_chain(3, 5))


def test_a_target_that_is_not_on_this_machine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"target\.path: .*config\.json"):
        create(DraftSection(method="synthetic"), TargetSection(path=str(tmp_path)))


def test_a_configuration_of_the_target_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=f"model directory '{tmp_path}': its configuration cannot be read"):
        create(DraftSection(method="synthetic"), TargetSection(path=str(tmp_path)))
