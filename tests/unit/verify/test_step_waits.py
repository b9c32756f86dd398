"""A step of the target waits for a GPU once: decisions, log-probabilities and evidence arrive together."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.target_section import EvidenceSection
from cluster.core.drafting import DraftBudget, Evidence
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, StepSample, Verdict, VerifyRow
from deploy.implied_settings import with_implied_settings
from tests.support.engines.one_rank import group_of_one
from tests.support.fakes.host_waits import OnGpu
from tests.support.models import tiny
from workers.draft.registry import create
from workers.serve.configuration import load_configuration
from workers.verify import evidence as evidences
from workers.verify import verdicts
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine

GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=0.9, seed=3)
LOGPROBS = SamplingParameters(temperature=0.8, seed=5, logprobs=3)
LISTED = SamplingParameters(temperature=0.0, logprobs=0, logprob_token_ids=(9, 4), repetition_penalty=1.3)
PROFILE = (StepSample(1, 1, 0.001),)
BUDGET = DraftBudget(6, 4)
SENT = EvidenceSection(taps=(1, 2), top=3, decisions=True, is_sent=True)


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations of torch decide, also where `triton` is installed."""
    monkeypatch.setattr("workers.sampling.decide.has_triton", lambda: False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("waits"), tiny.llama(), sharpness=2.0)


def engine_of(
    directory: Path, draft: dict[str, Any] | None = None, evidence: EvidenceSection | None = None, **target: Any
) -> TargetEngine:
    section = {
        "path": str(directory),
        "device": "cpu",
        "compile": "off",
        "native": "off",
        "kv": {"pool_bytes": 1 << 20},
    }
    drafting = {"draft": draft} if draft else {}
    configuration = with_implied_settings(load_configuration({"target": section | target, **drafting}))
    method = create(configuration.draft, configuration.target) if draft else None
    served = configuration.target
    if evidence is not None:  # what a drafter in another process needs
        served = served.model_copy(update={"evidence": evidence})
    return build_engine(served, method=method, profile=PROFILE)


def steps(
    engine: TargetEngine,
    samplings: Sequence[SamplingParameters],
    known: dict[str, list[int]] | None = None,
    waits: list[list[str]] | None = None,
) -> list[Verdict]:
    """The verdicts of some steps. The trees have tokens of `known` answers and wrong ones; `waits` gets those of each
    step."""
    draw, found = random.Random(1), list[Verdict]()
    prompts = [tuple(draw.randrange(3, tiny.VOCABULARY) for _ in range(5 + 3 * row)) for row in range(len(samplings))]
    rows = [
        VerifyRow(SequenceId(str(row)), len(prompt), prompt, start=SequenceStart(len(prompt), one), next_budget=BUDGET)
        for row, (prompt, one) in enumerate(zip(prompts, samplings, strict=True))
    ]
    for _ in range(6 if known else 20):
        if waits is None:
            result = engine.step(StepBatch(tuple(rows)))
        else:
            with OnGpu() as gpu:
                result = engine.step(StepBatch(tuple(rows)))
            waits.append(gpu.waits)
        found += result.verdicts
        for index, (row, verdict) in enumerate(zip(rows, result.verdicts, strict=True)):
            assert verdict.fault is None
            end, tree = row.base_len + len(verdict.tokens), TokenTree()
            if known:
                following = known[row.sequence_id][end - len(prompts[index]) :][:2] or [7]
                tree = TokenTree.from_candidates([[(following[0] + 1) % tiny.VOCABULARY], following], max_nodes=3)
            if known and verdict.proposal is not None and len(verdict.proposal.tree):
                tree = verdict.proposal.tree
            rows[index] = VerifyRow(row.sequence_id, end, verdict.tokens[-1:], tree, next_budget=BUDGET)
    engine.release_all()
    return found


def as_values(found: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts with rounded log-probabilities, and the bytes of hidden states."""

    def plain(shown: Evidence | None) -> Any:
        hidden = None if shown is None else shown.hidden
        return shown and hidden and replace(shown, hidden=replace(hidden, data=bytes(hidden.data)))

    return [replace(one, evidence=plain(one.evidence) or one.evidence, logprobs=()) for one in found]


def texts_of(found: Sequence[Verdict]) -> dict[str, list[int]]:
    """The tokens of each sequence."""
    texts: dict[str, list[int]] = {}
    for verdict in found:
        texts.setdefault(verdict.sequence_id, []).extend(verdict.tokens)
    return texts


def check_one_wait(
    make: Callable[[], TargetEngine],
    samplings: Sequence[SamplingParameters],
    waits: int = 1,
) -> list[Verdict]:
    """Check that each step waits so often, and that the verdicts are those of an engine on a CPU."""
    counted: list[list[str]] = []
    both: list[list[Verdict]] = []
    for seen in (None, counted):
        engine = make()  # drafting methods learn, so each engine runs the same steps
        known = texts_of(steps(engine, samplings))
        both.append(steps(engine, samplings, known, seen))
        engine.close()
    expected, found = both
    assert counted == [["copies"] * waits] * len(counted)
    pairs = zip(texts_of(found).values(), texts_of(expected).values(), strict=True)
    assert all(one[: len(other)] == other[: len(one)] for one, other in pairs)
    assert as_values(found) == as_values(expected)
    for one, other in zip(found, expected, strict=True):
        assert [(each.token, each.rank) for each in one.logprobs] == [
            (each.token, each.rank) for each in other.logprobs
        ]
        assert [[token for token, _ in each.top] for each in one.logprobs] == [
            [token for token, _ in each.top] for each in other.logprobs
        ]
        numbers, others = ([each.logprob for each in verdict.logprobs] for verdict in (one, other))
        assert numbers == pytest.approx(others, abs=1e-5)
    return found


def test_a_plain_step_waits_once(directory: Path) -> None:
    assert any(one.accepted for one in check_one_wait(lambda: engine_of(directory), [GREEDY, SAMPLED, GREEDY]))


def test_a_step_with_log_probabilities_waits_once(directory: Path) -> None:
    found = check_one_wait(lambda: engine_of(directory), [LOGPROBS, GREEDY, LISTED])
    assert any(one.accepted and one.logprobs for one in found)


def test_a_step_that_drafts_with_recycling_waits_once(directory: Path) -> None:
    """Recycling reads the target's most probable tokens."""
    found = check_one_wait(lambda: engine_of(directory, {"method": "recycling"}), [GREEDY, SAMPLED, LOGPROBS])
    assert any(one.proposal is not None and len(one.proposal.tree) for one in found)
    assert any(one.accepted for one in found)


def test_a_step_that_sends_hidden_states_waits_once(directory: Path) -> None:
    found = check_one_wait(lambda: engine_of(directory, evidence=SENT), [GREEDY, LOGPROBS, SAMPLED])
    shown = [one.evidence for one in found if one.accepted]
    assert shown and all(one is not None and one.hidden is not None and one.top and one.decisions for one in shown)


def test_ranks_wait_once(directory: Path) -> None:
    """Rows whose log-probabilities are wanted need the whole vocabulary, others a part; the first rank ranks tokens."""
    with group_of_one("cpu"):
        found = check_one_wait(lambda: engine_of(directory, evidence=SENT), [GREEDY, LOGPROBS, SAMPLED])
    assert any(one.accepted for one in found)


@pytest.mark.parametrize(("rule", "waits"), [("typical", 1), ("rejection", 2), ("block", 2)])
def test_a_rule_that_reads_distributions_waits_once_and_to_draw_once_more(
    directory: Path, rule: str, waits: int
) -> None:
    found = check_one_wait(lambda: engine_of(directory, acceptance=rule), [SAMPLED, GREEDY, SAMPLED], waits)
    assert any(one.accepted for one in found)


def test_what_is_much_follows_with_one_more_wait_for_accepted_nodes_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidences, "_MOST_SHOWN_BYTES", 0)
    monkeypatch.setattr(evidences, "_MOST_RANKED", 0)
    check_one_wait(lambda: engine_of(directory, evidence=SENT), [GREEDY, SAMPLED], waits=2)
    monkeypatch.setattr(verdicts, "_MOST_AHEAD", 0)
    check_one_wait(lambda: engine_of(directory), [GREEDY, LOGPROBS], waits=2)
