"""Synthetic acceptance: the target accepts drafts at random and reports that it is not lossless."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, WorkerUnavailable
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, Verdict, VerifyRow
from deploy.commands.demo import TimedAnswer, conclusion
from deploy.implied_settings import NOT_LOSSLESS, with_implied_settings
from tests.support.models import tiny
from workers.sampling.acceptance import create_rule
from workers.sampling.rules.synthetic import Synthetic, synthetic_token
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine

PROMPT = tuple(range(3, 20))
DRAFTED = (11, 12, 13, 14)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("synthetic"), tiny.llama())


def open_engine(directory: Path, *rates: float) -> TargetEngine:
    rule = {"acceptance": "synthetic", "synthetic": {"rates": rates}} if rates else {}
    target = {"path": str(directory), "device": "cpu", "kv": {"pool_bytes": 1 << 20}, "compile": "off"} | rule
    return build_engine(load_configuration({"target": target}).target)


def first_step(engine: TargetEngine, tree: TokenTree, seed: int = 5) -> Verdict:
    start = SequenceStart(len(PROMPT), SamplingParameters(temperature=0.0, seed=seed))
    row = VerifyRow(SequenceId("a"), len(PROMPT), PROMPT, tree, start=start)
    return engine.step(StepBatch((row,))).verdicts[0]


def test_synthetically_accepted_tokens_and_their_kv_are_committed(directory: Path) -> None:
    """Later tokens are computed from the keys and values of the accepted tokens."""
    engine, plain = open_engine(directory, 1.0, 1.0, 1.0, 1.0, 0.0), open_engine(directory)
    verdict = first_step(engine, TokenTree.chain(DRAFTED))
    assert verdict.tokens[:-1] == DRAFTED
    assert (verdict.accepted, verdict.drafted) == (4, 4)
    end = len(PROMPT) + len(DRAFTED)
    start = SequenceStart(len(PROMPT), SamplingParameters(temperature=0.0))
    whole = VerifyRow(SequenceId("b"), end, (*PROMPT, *DRAFTED), start=start)
    assert plain.step(StepBatch((whole,))).verdicts[0].tokens == verdict.tokens[-1:]
    follow = VerifyRow(SequenceId("a"), end + 1, verdict.tokens[-1:])
    assert engine.step(StepBatch((follow,))).verdicts[0].fault is None


def test_the_token_after_the_drafts_may_be_synthetic_as_well(directory: Path) -> None:
    verdict = first_step(open_engine(directory, 1.0), TokenTree.chain(DRAFTED))
    assert verdict.tokens == (*DRAFTED, synthetic_token(5, len(PROMPT) + len(DRAFTED), tiny.VOCABULARY))


@pytest.mark.slow
def test_the_same_seed_accepts_the_same_drafts_again(directory: Path) -> None:
    """A second engine with the same seed stands for another rank."""
    tree = TokenTree.chain(DRAFTED)
    lengths = [[first_step(open_engine(directory, 0.5), tree, seed).accepted for seed in range(6)] for _ in range(2)]
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) > 1


def test_a_target_reports_whether_it_is_lossless(directory: Path) -> None:
    assert open_engine(directory).info().is_lossless
    assert not open_engine(directory, 0.5).info().is_lossless


def configured(**draft: object) -> Configuration:
    return load_configuration({"draft": draft})


def test_a_synthetic_drafter_makes_its_target_accept_at_random() -> None:
    plain, experiment = configured(method="ngram"), configured(method="synthetic", synthetic={"acceptance": (0.9, 0.6)})
    assert with_implied_settings(plain).target.acceptance == plain.target.acceptance
    settled = with_implied_settings(experiment)
    assert settled.target.acceptance == "synthetic"
    assert create_rule(settled.target) == Synthetic((0.9, 0.6))
    assert not create_rule(settled.target).is_lossless
    assert with_implied_settings(settled) == settled


def test_the_demo_does_not_compare_answers_that_are_not_lossless() -> None:
    mine, other = (TimedAnswer(tokens, 1, 2, 1, 1.0, 0.5) for tokens in ((1, 2), (1, 3)))
    assert conclusion("float32", False, mine, other) == f"{NOT_LOSSLESS}."
    assert conclusion("float32", True, mine, mine) == "Both answers are the same 2 tokens."
    with pytest.raises(WorkerUnavailable, match="must not happen in float32"):
        conclusion("float32", True, mine, other)
    assert "differ" in conclusion("bfloat16", True, mine, other)


@pytest.mark.parametrize(
    "target", [{"acceptance": "synthetic", "synthetic": {"rates": [0.8]}}, {"synthetic": {"rates": [0.5]}}]
)
def test_no_other_method_may_use_synthetic_acceptance(target: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"is refused; draft\.method=synthetic sets it"):
        with_implied_settings(load_configuration({"target": target}))
