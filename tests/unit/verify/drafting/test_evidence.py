"""A step takes evidence for the rows that are drafted for, and hidden states only where a method reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import EvidenceSection, KvSection
from cluster.core.drafting import EVIDENCE_ONLY, NO_DRAFT, DraftBudget, DraftRow, Evidence, Proposal
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.core.tree import TokenTree
from cluster.core.verification import Verdict, VerifyRow
from tests.support.fakes.host_waits import OnGpu
from tests.support.models import tiny
from workers.forward.loaded_model import LoadedModel, PassOptions
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.sampling.acceptance import Accepted
from workers.transfer import HostCopies
from workers.verify import evidence
from workers.verify.decider import LocalDecider
from workers.verify.evidence import EvidenceCollector

BUDGET = DraftBudget(4, 4)
TOKENS = (5, 6, 7)


class Unread:
    """A method that reads hidden states at any time."""

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        return tuple(Proposal(row.sequence_id, row.base_len) for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Nothing is held."""


class Reader(Unread):
    """A method that says whether it reads hidden states."""

    def __init__(self) -> None:
        self.reads_hidden = True


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    """A tiny model."""
    return load_model(ModelSection(path=str(tiny.save(tmp_path, tiny.llama())), device="cpu", compile="off"))


def row(budget: DraftBudget, *, decide: bool = True) -> VerifyRow:
    return VerifyRow(SequenceId("s"), len(TOKENS), TOKENS, decide=decide, next_budget=budget)


@pytest.fixture
def pool(model: LoadedModel) -> KvPool:
    """The pool of `runner`."""
    return KvPool(model.kv_spec, KvSection(block_size=4), 20)


@pytest.fixture
def runner(model: LoadedModel, pool: KvPool) -> ModelRunner:
    """A runner with tap 1."""
    return ModelRunner(model, pool, (1,))


def collector(
    runner: ModelRunner, method: DraftMethod | None, *, is_alone: bool = True, is_sent: bool = False
) -> EvidenceCollector:
    section = EvidenceSection(taps=(1,), decisions=True, is_sent=is_sent)
    return EvidenceCollector(section, runner, LocalDecider(), is_alone, method)


def test_features_are_sent_in_place_of_the_hidden_states_that_they_are_made_of(
    model: LoadedModel, pool: KvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "_MOST_FUSED", 7)
    runner, tree = ModelRunner(model, pool, (1, 2)), TokenTree((3, 4, 5), (-1, -1, 1))
    section = EvidenceSection(taps=(1, 2), is_sent=True)
    passes: list[int] = []

    def fuse(taps: torch.Tensor) -> torch.Tensor:
        passes.append(len(taps))
        return taps.float().mean(dim=1)

    plain = EvidenceCollector(section, runner, LocalDecider(), True)
    fused = EvidenceCollector(section, runner, LocalDecider(), True, fuse=fuse)
    rows = [VerifyRow(SequenceId(name), len(TOKENS), TOKENS, tree) for name in "ab"]
    forwards = [ForwardRow(pool.new_table(), TOKENS, tree, select=(2, 3, 4, 5)) for _ in rows]
    for forward in forwards:
        pool.reserve(forward.table, forward.end)
    for _ in range(2):
        logits = runner.forward(forwards, PassOptions(with_taps=True))
        accepted = [Accepted(nodes=(1, 2), tokens=(4, 5, 6))] * len(rows)
        sent = [_collected(one, rows, accepted, (4, 6, 5, 6), logits) for one in (plain, fused)]
        for states, features in zip(*(map(_values, each) for each in sent), strict=True):
            assert torch.equal(features, states.view(len(states), 2, -1).float().mean(dim=1).bfloat16())
            assert (len(states), 2 * features.shape[1]) == (len(TOKENS) + 2, states.shape[1])
    assert passes == [7, 5, 7, 5]  # once a pass, for all rows, and few tokens at once


def test_hidden_states_and_probable_tokens_of_all_rows_are_copied_from_a_gpu_at_once(
    runner: ModelRunner, pool: KvPool
) -> None:
    tree = TokenTree((3, 4, 5), (-1, -1, 1))
    section = EvidenceSection(taps=(1,), top=2, is_sent=True)
    found = EvidenceCollector(section, runner, LocalDecider(), True)
    rows = [VerifyRow(SequenceId(name), len(TOKENS), TOKENS, tree) for name in "abc"]
    forwards = [ForwardRow(pool.new_table(), TOKENS, tree, select=(2, 3, 4, 5)) for _ in rows]
    for forward in forwards:
        pool.reserve(forward.table, forward.end)
    logits = runner.forward(forwards, PassOptions(with_taps=True))
    accepted = [Accepted((), (4,)), Accepted((1, 2), (4, 5, 6)), Accepted((0,), (3, 8))]
    expected = _collected(found, rows, accepted, (), logits)
    with OnGpu() as gpu:
        sent = _collected(found, rows, accepted, (), logits)
    assert gpu.waits == ["copies"]
    assert [len(_values(one)) for one in sent] == [3, 5, 4]
    for one, other in zip(sent, expected, strict=True):
        assert one is not None and other is not None
        assert torch.equal(_values(one), _values(other))
        assert one.top == other.top
    assert [len(one.top) for one in sent if one is not None] == [1, 3, 2]


class OtherRank(LocalDecider):
    """Decides on a rank that is not the first."""

    def most_probable(self, logits: torch.Tensor, count: int) -> torch.Tensor | None:
        return None


def test_ranks_without_the_most_probable_tokens_copy_none_whatever_the_type_of_their_logits(
    runner: ModelRunner,
) -> None:
    """Only the first rank ranks tokens. Logits on a GPU are usually bfloat16, which NumPy does not have."""
    found = EvidenceCollector(EvidenceSection(top=2, is_sent=True), runner, OtherRank(), False)
    tree = TokenTree((3, 4, 5), (-1, -1, 1))
    rows = [VerifyRow(SequenceId(name), len(TOKENS), TOKENS, tree) for name in "ab"]
    logits, copies = torch.zeros(8, 9, dtype=torch.bfloat16), HostCopies()
    decisions = copies.add(torch.arange(8))
    with OnGpu() as gpu:
        found.launch(rows, [range(4), range(4, 8)], logits, copies)
        assert decisions().tolist() == list(range(8))
        sent = _collected(found, rows, [Accepted((), (4,)), Accepted((1, 2), (4, 5, 6))], (), logits)
    assert gpu.waits == ["copies"]
    assert [one and one.top for one in sent] == [(), ()]


def _collected(
    found: EvidenceCollector,
    rows: Sequence[VerifyRow],
    accepted: Sequence[Accepted],
    decisions: Sequence[int],
    logits: torch.Tensor,
) -> list[Evidence | None]:
    """The complete evidence of rows, each with four decisions."""
    verdicts = {}
    for index, (verified, path) in enumerate(zip(rows, accepted, strict=True)):
        shown = found.collect(index, verified, path, decisions, logits[4 * index : 4 * index + 4])
        verdicts[verified.sequence_id] = Verdict(verified.sequence_id, verified.base_len, path.tokens, evidence=shown)
    found.complete(verdicts)
    return [verdict.evidence for verdict in verdicts.values()]


def _values(found: Evidence | None) -> torch.Tensor:
    assert found is not None and found.hidden is not None
    return torch.frombuffer(bytearray(found.hidden.data), dtype=torch.bfloat16).view(-1, found.hidden.width)


def test_hidden_states_are_recorded_for_rows_with_a_budget_only(runner: ModelRunner) -> None:
    found = collector(runner, Unread())
    assert not found.records_hidden([row(NO_DRAFT), row(NO_DRAFT)])
    assert found.records_hidden([row(NO_DRAFT), row(BUDGET)])
    assert found.records_hidden([row(EVIDENCE_ONLY, decide=False)])  # a chunk of a prompt that is drafted for later


def test_hidden_states_are_recorded_only_while_the_method_reads_them(runner: ModelRunner) -> None:
    method = Reader()
    found, ranks = collector(runner, method), collector(runner, method, is_alone=False)
    assert found.records_hidden([row(BUDGET)])
    method.reads_hidden = False
    assert not found.records_hidden([row(BUDGET)])
    assert ranks.records_hidden([row(BUDGET)])  # what one rank's method reads is not known to the others


def test_drafters_in_other_processes_are_shown_every_step(runner: ModelRunner) -> None:
    assert collector(runner, None, is_sent=True).records_hidden([row(NO_DRAFT)])


def test_evidence_of_a_step_follows_what_was_recorded(runner: ModelRunner, pool: KvPool) -> None:
    found = collector(runner, Unread())
    table = pool.new_table()
    forward = ForwardRow(table, TOKENS, select=(len(TOKENS) - 1,))
    pool.reserve(table, forward.end)
    accepted = Accepted(nodes=(), tokens=(8,))
    for budget in (BUDGET, NO_DRAFT):
        logits = runner.forward([forward], PassOptions(with_taps=found.records_hidden([row(budget)])))
        (shown,) = _collected(found, [row(budget)], [accepted], (8,), logits)
        if budget == NO_DRAFT:
            assert shown is None
        else:
            assert shown is not None and shown.hidden is not None
            assert (shown.decisions, len(shown.hidden)) == ((8,), len(TOKENS))
