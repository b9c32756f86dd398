"""An acceptance rule that asks for the target's distribution, from its registration to a step of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.core.config.base import PluginSettings
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart, ThinkingBudget, TokenLogprobs
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, Verdict, VerifyRow
from tests.support.models import tiny
from tests.support.models.sampling_reference import probabilities
from workers.sampling.acceptance import RULES, Accepted, DecidedTree, register_rule
from workers.serve.configuration import load_configuration
from workers.verify import decider
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine

PROMPT = (5, 17, 33, 8, 60, 41, 41, 9)
CHAIN = TokenTree.chain((20, 30, 40))
SAMPLED = SamplingParameters(temperature=0.8, top_k=20, seed=3)
SERVED = [name for name in RULES.names() if name != "synthetic"]
"""All rules but that of experiments, which one drafting method alone selects."""


class ThresholdSettings(PluginSettings):
    """Settings of `Threshold`."""

    least: float = 0.5
    """The minimum probability of an accepted token."""


@dataclass
class Threshold:
    """Accepts first children while their target probability is high enough, like Medusa's typical acceptance."""

    least: float
    seen: list[Tensor | None]
    is_lossless: bool = False
    needs_distribution: bool = True

    def accept(self, step: DecidedTree) -> Accepted:
        self.seen.append(step.log_probabilities)
        nodes: list[int] = []
        for node, token in enumerate(step.tree.tokens):  # a chain
            if float(step.known_log_probabilities[node, token].exp()) < self.least:
                break
            nodes.append(node)
        return step.accepted(nodes)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("rules"), tiny.llama(), sharpness=1.0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """Registers the rule for one test, and records the distributions that it receives."""
    distributions: list[Tensor | None] = []
    RULES.names()  # the packaged rules are registered now
    monkeypatch.setattr(RULES, "_plugins", dict(RULES._plugins))
    register_rule("threshold", ThresholdSettings)(lambda settings: Threshold(settings.least, distributions))
    return distributions


def engine_with(directory: Path, **target: Any) -> TargetEngine:
    values = {"path": str(directory), "device": "cpu", "compile": "off", "kv": {"pool_bytes": 1 << 20}}
    return build_engine(load_configuration({"target": values | target}).target)


def verify(engine: TargetEngine, sampling: SamplingParameters, name: str = "a") -> Verdict:
    row = VerifyRow(SequenceId(name), len(PROMPT), PROMPT, CHAIN, start=SequenceStart(len(PROMPT), sampling))
    return engine.step(StepBatch((row,))).verdicts[0]


def expected_distribution(directory: Path, sampling: SamplingParameters) -> list[list[float]]:
    """The distribution after the prompt and after each token of the chain, by `transformers` and plain Python."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = [*PROMPT, *CHAIN.tokens]
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    ends = range(len(PROMPT), len(tokens) + 1)
    return [probabilities(logits[end - 1].tolist(), sampling, tokens[:end], len(PROMPT)) for end in ends]


@pytest.mark.parametrize(
    ("sampling", "drawn_from"),
    [(SAMPLED, SAMPLED), (SamplingParameters(temperature=0.0), SamplingParameters(temperature=1.0))],
    ids=["sampled", "greedy"],
)
def test_a_rule_gets_the_distribution_at_every_node(
    directory: Path, seen: list[Tensor | None], sampling: SamplingParameters, drawn_from: SamplingParameters
) -> None:
    """In a greedy row they are those at temperature 1, because the greedy distribution shows only the decision."""
    verify(engine_with(directory, acceptance="threshold"), sampling)
    distribution = seen[-1]
    assert distribution is not None
    assert distribution.shape == (len(CHAIN) + 1, tiny.VOCABULARY)
    expected = torch.tensor(expected_distribution(directory, drawn_from))
    torch.testing.assert_close(distribution.exp(), expected, atol=1e-4, rtol=1e-3)


def test_the_rule_decides_by_the_distribution_and_by_its_own_settings(
    directory: Path, seen: list[Tensor | None]
) -> None:
    sampling = SamplingParameters(temperature=1.0, seed=3)
    expected = expected_distribution(directory, sampling)
    probabilities = [expected[node][token] for node, token in enumerate(CHAIN.tokens)]
    generous = verify(
        engine_with(directory, acceptance="threshold", threshold={"least": min(probabilities) * 0.9}), sampling
    )
    assert generous.tokens[:-1] == CHAIN.tokens
    strict = verify(engine_with(directory, acceptance="threshold", threshold={"least": 0.999}), sampling)
    assert strict.accepted == 0


def test_rows_of_one_step_get_their_own_distributions(directory: Path, seen: list[Tensor | None]) -> None:
    engine = engine_with(directory, acceptance="threshold")
    verify(engine, SAMPLED)
    alone = seen[-1]
    start = SequenceStart(len(PROMPT), SAMPLED)
    rows = (
        VerifyRow(SequenceId("b"), 3, (7, 8, 9), start=SequenceStart(3, SAMPLED)),
        VerifyRow(SequenceId("c"), 2, (7, 8), decide=False, start=SequenceStart(3, SAMPLED)),
        VerifyRow(SequenceId("d"), len(PROMPT), PROMPT, CHAIN, start=start),
    )
    engine.step(StepBatch(rows))
    assert alone is not None
    *_, short, own = seen
    assert short is not None and own is not None
    assert short.shape == (1, tiny.VOCABULARY)
    torch.testing.assert_close(own, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rule", SERVED)
def test_a_step_may_read_a_part_of_a_prompt_and_decide_nothing(directory: Path, rule: str) -> None:
    engine, start = engine_with(directory, acceptance=rule), SequenceStart(len(PROMPT), SAMPLED)
    part = VerifyRow(SequenceId("a"), 5, PROMPT[:5], decide=False, start=start)
    (read,) = engine.step(StepBatch((part,))).verdicts
    assert read.fault is None and not read.tokens
    rest = VerifyRow(SequenceId("a"), len(PROMPT), PROMPT[5:])
    assert engine.step(StepBatch((rest,))).verdicts[0].tokens == verify(engine, SAMPLED, "b").tokens[:1]


def test_a_lossy_rule_makes_the_target_lossy(directory: Path, seen: list[Tensor | None]) -> None:
    assert engine_with(directory).info().is_lossless
    assert not engine_with(directory, acceptance="threshold").info().is_lossless


def test_logits_without_a_number_give_no_probability_to_any_token() -> None:
    context = decider.DecisionContext(SAMPLED, (1, 2), 1)
    distribution = decider.log_distribution(torch.full((1, 5), math.nan), [context])
    assert distribution.tolist() == [[-math.inf] * 5]


def test_no_distribution_is_computed_for_a_rule_that_does_not_need_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Tensor:
        raise AssertionError("a distribution was computed")

    monkeypatch.setattr(decider, "log_distribution", fail)
    assert verify(engine_with(directory), SAMPLED).fault is None


@pytest.mark.parametrize("rule", SERVED)
def test_tokens_before_a_place_where_nothing_can_be_decided_are_sent_with_and_without_drafts(
    directory: Path, rule: str
) -> None:
    """Tokens before such a place may complete a stop string; the next row reports the place."""
    engine = engine_with(directory, acceptance=rule)
    twice = replace(SAMPLED, allowed_token_ids=(4,), bad_words=((4, 4, 4),), logprobs=1)

    def answered(drafts: TokenTree) -> tuple[list[int], list[TokenLogprobs], list[int]]:
        tokens, logprobs, accepted = list(PROMPT), list[TokenLogprobs](), list[int]()
        row = VerifyRow(SequenceId("a"), len(PROMPT), PROMPT, drafts, start=SequenceStart(len(PROMPT), twice))
        while (verdict := engine.step(StepBatch((row,))).verdicts[0]).fault is None:
            tokens += verdict.tokens
            logprobs += verdict.logprobs
            accepted.append(verdict.accepted)
            row = VerifyRow(SequenceId("a"), len(tokens), verdict.tokens[-1:], drafts)
        assert "no token can be chosen" in verdict.fault.message
        return tokens[len(PROMPT) :], logprobs, accepted

    plain, drafted = answered(TokenTree()), answered(TokenTree.chain((4, 4)))
    assert plain[0] == drafted[0] == [4, 4]
    assert (plain[2], drafted[2]) == ([0, 0], [1])
    assert [one.logprob for one in drafted[1]] == pytest.approx([one.logprob for one in plain[1]], abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"acceptance": "blockwise", "blockwise": {"minimum_block": 4}},
        {"acceptance": "blockwise", "blockwise": {"distance": tiny.VOCABULARY}},
        {"acceptance": "synthetic", "synthetic": {"rates": [1.0]}},
    ],
    ids=["minimum block", "distance", "synthetic"],
)
@pytest.mark.parametrize(
    "excluding",
    [
        {"allowed_token_ids": (4, 20)},
        {"bad_words": ((20, 30),)},
        {"end_token_ids": (30,), "min_tokens": 2},
        {"thinking": ThinkingBudget(0, end=(20, 7))},
    ],
    ids=["allowed", "bad words", "minimal length", "forced"],
)
def test_a_lossy_rule_accepts_no_token_that_the_request_excludes(
    directory: Path, settings: dict[str, Any], excluding: dict[str, Any]
) -> None:
    """The second token of the draft is excluded, so the target decides in its place."""
    tokens = verify(engine_with(directory, **settings), replace(SAMPLED, **excluding)).tokens
    assert len(tokens) == 2
    assert tokens[0] == 20
    assert tokens[1] != 30
