"""A target and a draft model with `rejection` and `block`: the committed tokens follow the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.clusters.restartable_drafters import TIMEOUT_SECONDS, FullAnswer, SamplingCase, restartable_cluster
from tests.support.deadline import deadline
from tests.support.models import tiny, tiny_tokenizer
from tests.support.models.enumerable import BAR, chi_square
from tests.support.models.sampling_reference import probabilities
from workers.draft.model.drawing_drafter import DrawingDrafter
from workers.draft.registry import create
from workers.sampling.noise import gumbel
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine

pytestmark = pytest.mark.slow

VOCABULARY = 6
PROMPT = (5, 1, 3, 4)
LENGTH = 3
BATCH = 64
SEEDS = 1536
BUDGET = DraftBudget(6, 3)
SAMPLINGS = {
    "plain": SamplingParameters(),
    "top-k": SamplingParameters(temperature=0.8, top_k=4),
    "penalties": SamplingParameters(temperature=1.2, top_p=0.9, presence_penalty=0.8),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(vocab_size=VOCABULARY), sharpness=1.5)


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.blur(target, tmp_path_factory.mktemp("draft"), noise=0.4)


def configured(target: Path, draft: Path, rule: str, **model: Any) -> Configuration:
    common = {"device": "cpu", "compile": "off", "native": "off", "kv": {"pool_bytes": 8 << 20}}
    return load_configuration(
        {
            "target": common | {"path": str(target), "acceptance": rule},
            "draft": {
                "method": "model",
                "model": common | {"path": str(draft)} | model,
                "max_nodes": 8,
                "max_depth": 3,
            },
        }
    )


class Loop:
    """Drafts, verifies and commits many sequences at once, without sockets."""

    def __init__(self, configuration: Configuration) -> None:
        self._engine = build_engine(configuration.target)
        self._method = create(configuration.draft, configuration.target)
        self.accepted = 0
        self.shapes: set[tuple[int, ...]] = set()

    def write(self, sampling: SamplingParameters, seeds: range) -> list[tuple[int, ...]]:
        texts = {seed: Text(seed, SequenceStart(len(PROMPT), replace(sampling, seed=seed))) for seed in seeds}
        running = list(texts.values())
        while running:
            proposals = self._method.propose([text.draft_row() for text in running])
            rows = tuple(text.verify_row(proposal) for text, proposal in zip(running, proposals, strict=True))
            self.shapes.update(row.tree.parents for row in rows)
            for text, verdict in zip(running, self._engine.step(StepBatch(rows)).verdicts, strict=True):
                assert verdict.fault is None
                self.accepted += verdict.accepted
                text.stored = len(text.tokens) + verdict.accepted
                text.tokens += verdict.tokens
            running = [text for text in running if len(text.tokens) < len(PROMPT) + LENGTH]
        self._engine.release([text.name for text in texts.values()])
        self._method.release([text.name for text in texts.values()])
        return [tuple(text.tokens[len(PROMPT) : len(PROMPT) + LENGTH]) for text in texts.values()]


@dataclass
class Text:
    """One sequence, and what drafter and target have of it."""

    seed: int
    start: SequenceStart
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))
    drafted: int = 0
    stored: int = 0

    @property
    def name(self) -> SequenceId:
        return SequenceId(str(self.seed))

    def draft_row(self) -> DraftRow:
        new = tuple(self.tokens[self.drafted :])
        start = self.start if self.drafted == 0 else None
        self.drafted = len(self.tokens)
        return DraftRow(self.name, len(self.tokens), new, BUDGET, start)

    def verify_row(self, proposal: Proposal) -> VerifyRow:
        assert proposal.fault is None
        assert not proposal.probabilities
        assert len(proposal.distributions) == len(proposal.tree)
        pending = tuple(self.tokens[self.stored :])
        start = self.start if self.stored == 0 else None
        distributions = proposal.distributions
        return VerifyRow(self.name, len(self.tokens), pending, proposal.tree, start=start, distributions=distributions)


def p_value(
    directory: Path, sampling: SamplingParameters, answers: list[tuple[int, ...]], prompt: tuple[int, ...] = PROMPT
) -> float:
    """Chi-square of the answers against the target's distribution, by `transformers` and plain Python."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    means: dict[tuple[int, ...], float] = {(): float(len(answers))}
    for _ in range(LENGTH):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer] for answer in means])).logits[:, -1].tolist()
        means = {
            (*answer, token): mean * probability
            for (answer, mean), row in zip(means.items(), logits, strict=True)
            for token, probability in enumerate(probabilities(row, sampling, [*prompt, *answer], len(prompt)))
            if probability > 0
        }
    return chi_square(answers, means)


@pytest.mark.parametrize(
    ("rule", "setting", "shape"),
    [
        ("rejection", "plain", (-1, -1, -1, 0, 0, 0)),
        ("rejection", "penalties", (-1, -1, -1, 0, 0, 0)),
        ("block", "top-k", (-1, 0, 1)),
        ("block", "penalties", (-1, 0, 1)),
    ],
)
def test_committed_tokens_follow_the_targets_distribution(
    target: Path, draft: Path, rule: str, setting: str, shape: tuple[int, ...]
) -> None:
    loop = Loop(configured(target, draft, rule))
    answers = [
        answer
        for first in range(0, SEEDS, BATCH)
        for answer in loop.write(SAMPLINGS[setting], range(first, first + BATCH))
    ]
    assert p_value(target, SAMPLINGS[setting], answers) > BAR
    assert loop.accepted > SEEDS / 4
    assert loop.shapes == {shape}  # whatever was drawn


def test_a_draft_drawn_from_another_distribution_than_stated_is_detected(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter always proposes the most probable tokens."""
    from workers.draft.model import token_drawer

    monkeypatch.setattr(token_drawer, "gumbel", lambda *arguments: 0.0 * gumbel(*arguments))
    loop = Loop(configured(target, draft, "rejection"))
    answers = [
        answer
        for first in range(0, SEEDS, BATCH)
        for answer in loop.write(SAMPLINGS["plain"], range(first, first + BATCH))
    ]
    assert p_value(target, SAMPLINGS["plain"], answers) < BAR


def test_the_text_differs_from_plain_decoding_with_the_same_seed(target: Path, draft: Path) -> None:
    loops = [Loop(configured(target, draft, rule)) for rule in ("rejection", "block", "rejection")]
    first, second, again = (loop.write(SAMPLINGS["plain"], range(BATCH)) for loop in loops)
    assert first == again
    assert first != second


@pytest.mark.parametrize(
    ("rule", "setting", "is_drawn"),
    [("rejection", "auto", True), ("coupled", "auto", False), ("rejection", "off", False), ("coupled", "on", True)],
)
def test_the_setting_chooses_between_drawn_and_ranked_drafts(
    target: Path, draft: Path, rule: str, setting: str, is_drawn: bool
) -> None:
    configuration = configured(target, draft, rule, distributions=setting)
    assert isinstance(create(configuration.draft, configuration.target), DrawingDrafter) is is_drawn


# --- streams of a whole cluster -------------------------------------------------------------------

STREAMED = SamplingParameters(temperature=1.2, top_k=3)
STREAMS, AT_ONCE = 480, 120


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("served"))
    target = tiny.save(directory, tiny.llama(vocab_size=320), sharpness=1.5)
    return target, tiny.blur(target, tmp_path_factory.mktemp("served_draft"), noise=0.2)


@pytest.mark.parametrize(("rule", "controller"), [("rejection", "off"), ("block", "off"), ("rejection", "auto")])
async def test_streams_follow_the_targets_distribution(served: tuple[Path, Path], rule: str, controller: str) -> None:
    configuration = configured(*served, rule)
    drafting = configuration.draft.model_copy(update={"controller": controller, "timeout_seconds": 30.0})
    server = configuration.server.model_copy(update={"grpc_port": 0, "http_port": 0})
    configuration = configuration.model_copy(update={"draft": drafting, "server": server})
    cases = [SamplingCase(2, replace(STREAMED, seed=seed), LENGTH, 320) for seed in range(STREAMS)]
    answers: list[FullAnswer] = []
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration) as cluster:
        for first in range(0, STREAMS, AT_ONCE):
            answers += await cluster.answer_all(cases[first : first + AT_ONCE])
    texts = [answer.tokens for answer in answers]
    assert p_value(served[0], STREAMED, texts, cases[0].prompt) > BAR
    assert not any(answer.lossy for answer in answers)
    if controller == "off":
        assert sum(answer.accepted for answer in answers) > STREAMS / 10
