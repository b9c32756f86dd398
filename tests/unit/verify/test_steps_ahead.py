"""A step that is launched before its rows come changes no token, whatever comes in its place."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import EvidenceSection, KvSection, TargetSection
from cluster.core.drafting import (
    EVIDENCE_ONLY,
    NO_DRAFT,
    DraftBudget,
    DraftRow,
    Proposal,
)
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.ports import DraftMethod
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import OpenRow, StepBatch, StepResult, Verdict, VerifyRow
from tests.support.engines.engine_rows import PROMPT, first_row, open_row
from tests.support.fakes.fake_gpu import FakeGpu
from tests.support.fakes.host_waits import OnGpu
from tests.support.models import tiny
from workers.draft.registry import create
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration
from workers.verify import ahead
from workers.verify.build import goes_ahead
from workers.verify.decider import LocalDecider
from workers.verify.engine import EngineOptions, TargetEngine
from workers.verify.walk import TreeWalk

BUDGET = DraftBudget(4, 4)
BUDGETS = (NO_DRAFT, EVIDENCE_ONLY, DraftBudget(2, 2), BUDGET)
EVERYTHING = EvidenceSection(taps=(1,), top=2, decisions=True)
SAMPLINGS = (SamplingParameters(temperature=0.0), SamplingParameters(temperature=0.8, top_p=0.9, seed=5))
BLOCKS, LONGEST = 200, 100


class Watched:
    """An engine of which it is known when it launches passes and when it waits for their decisions."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, method: DraftMethod | None = None) -> None:
        model = load_model(ModelSection(path=str(directory), device="cpu", native="off", compile="off"))
        self.pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=BLOCKS)
        evidence = EVERYTHING if isinstance(method, Shown) else EvidenceSection()
        options = EngineOptions(method=method, evidence=evidence, goes_ahead=True)
        self.engine = TargetEngine(model, self.pool, LocalDecider(), options)
        self.events: list[str] = []
        forward, walk = self.engine._runner.forward, TreeWalk.walk

        def launch(*arguments: Any) -> Any:
            self.events.append("launch")
            return forward(*arguments)

        def read(self_: TreeWalk, decider: Any) -> Any:
            self.events.append("read")
            return walk(self_, decider)

        monkeypatch.setattr(self.engine._runner, "forward", launch)
        monkeypatch.setattr(TreeWalk, "walk", read)

    def step(self, *rows: VerifyRow) -> tuple[Sequence[Verdict], list[str]]:
        """The verdicts, and what happened until they were there."""
        self.events.clear()
        verdicts = self.engine.step(StepBatch(rows)).verdicts
        return verdicts, [*self.events]


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched ahead from the first one on."""
    monkeypatch.setattr(ahead, "LEAST_SHARE", 0.0)


@pytest.fixture
def watched(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(ahead, "LEAST_SHARE", 0.0)
    return Watched(directory, monkeypatch)


class Shown:
    """A drafting method whose drafts depend on all that it is shown of the target's steps."""

    reads_hidden = True

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        return tuple(Proposal(row.sequence_id, row.base_len, self._tree(row)) for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Nothing is held."""

    def _tree(self, row: DraftRow) -> TokenTree:
        seen = zlib.crc32(repr(row.new_tokens).encode())
        for shown in row.evidence:
            hidden = b"" if shown.hidden is None else bytes(shown.hidden.data)
            seen = zlib.crc32(repr((shown.base_len, shown.decisions, shown.top)).encode() + hidden, seen)
        length = min(row.budget.max_nodes, row.budget.max_depth)
        return TokenTree.chain([3 + (seen + node) % (tiny.VOCABULARY - 3) for node in range(length)])


def ngram(directory: Path) -> DraftMethod:
    values = {"target": {"path": str(directory), "device": "cpu"}, "draft": {"method": "ngram"}}
    configuration = load_configuration(values)
    return create(configuration.draft, configuration.target)


def following(row: VerifyRow, verdict: Verdict, tree: TokenTree | None = None) -> VerifyRow:
    """The next row of a sequence: with this draft, or the one that the verdict brought."""
    drafted = EMPTY_TREE if verdict.proposal is None else verdict.proposal.tree
    end = row.base_len + len(verdict.tokens)
    tree = drafted if tree is None else tree
    return VerifyRow(row.sequence_id, end, verdict.tokens[-1:], tree, next_budget=row.next_budget)


def test_a_step_is_launched_before_its_rows_come_and_then_only_read(watched: Watched) -> None:
    row = first_row("a", PROMPT)
    (verdict,), happened = watched.step(row)
    assert happened == ["launch", "read"]
    for _ in range(5):
        watched.events.clear()
        assert not watched.engine.step_ahead()
        assert watched.events == ["launch"], "while no call waits"
        assert not watched.engine.step_ahead()
        assert watched.events == ["launch"], "once"
        row = following(row, verdict)
        (verdict,), happened = watched.step(row)
        assert happened == ["read"]


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("drafts", ["none", "looked up", "of what is shown", "of what is shown on a GPU"])
@pytest.mark.parametrize("seed", range(3))
def test_streams_drafts_and_blocks_are_the_same_whatever_comes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, seed: int, drafts: str
) -> None:
    """Sequences begin, end, are preempted and opened again, have other drafts than those that were proposed, and ask
    for other ones.
    """
    monkeypatch.setattr("workers.sampling.decide.has_triton", lambda: False)
    found: list[Any] = []
    for is_ahead in (False, True):
        method = {"none": None, "looked up": ngram(directory)}.get(drafts, Shown())
        watched = Watched(directory, monkeypatch, method)
        budgets = (NO_DRAFT,) if method is None else BUDGETS
        coordinator = Coordinator(watched, random.Random(seed), budgets, goes_ahead=is_ahead)
        with OnGpu() if drafts.endswith("GPU") else nullcontext():
            found.append([coordinator.run(rounds=70), coordinator.occupancies, coordinator.proposals])
        assert coordinator.ahead > 20 if is_ahead else not coordinator.ahead
        assert bool(coordinator.asked_anew) == (is_ahead and method is not None)
        assert coordinator.accepted or drafts != "looked up"
        assert any(coordinator.proposals) == (method is not None)
        kv = watched.engine.release_all()
        assert kv.blocks_free == kv.blocks_total
    assert found[0] == found[1]


class Coordinator:
    """Sends rows as a coordinator does, with all that may happen to sequences. It draws the same for equal verdicts."""

    def __init__(
        self, watched: Watched, draw: random.Random, budgets: Sequence[DraftBudget], *, goes_ahead: bool
    ) -> None:
        self._watched, self._engine, self._draw, self._budgets = watched, watched.engine, draw, budgets
        self._budget = budgets[-1]
        self._goes_ahead = goes_ahead
        self._texts: dict[SequenceId, list[int]] = {}
        self._starts: dict[SequenceId, SequenceStart] = {}
        self._rows: dict[SequenceId, VerifyRow] = {}
        self.occupancies: list[KvOccupancy] = []
        self.proposals: list[Proposal | None] = []
        self.ahead = self.asked_anew = self.accepted = 0

    def run(self, rounds: int) -> dict[SequenceId, list[int]]:
        """The texts after so many rounds."""
        for _ in range(rounds):
            self._change()
            self._idle()
            batch = StepBatch(tuple(self._rows.values()))
            self._watched.events.clear()
            is_equal = self._engine._ahead._expected == batch
            result = self._engine.step(batch)
            self.ahead += self._watched.events == ["read"]
            self.asked_anew += self._watched.events == ["read"] and not is_equal
            self._idle()
            self._commit(batch, result)
        return self._texts

    def _idle(self) -> None:
        if self._goes_ahead:
            self._engine.step_ahead()

    def _change(self) -> None:
        event = self._draw.random() if self._rows else 0.0
        if event < 0.1 and len(self._rows) < 5:
            self._begin()
        elif event < 0.2:
            self._engine.release([SequenceId("unknown"), self._chosen()])
        elif event < 0.3:
            self._preempt(self._chosen())
        elif event < 0.35:
            self._engine.info()
        if not self._rows:
            self._begin()

    def _chosen(self) -> SequenceId:
        """A sequence without a row from now on."""
        chosen = self._draw.choice(list(self._rows))
        del self._rows[chosen]
        return chosen

    def _begin(self) -> None:
        name = SequenceId(f"s{len(self._texts)}")
        prompt = tuple(self._draw.randrange(3, tiny.VOCABULARY) for _ in range(self._draw.randrange(2, 9)))
        self._starts[name] = SequenceStart(len(prompt), self._draw.choice(SAMPLINGS))
        self._texts[name] = list(prompt)
        self._rows[name] = VerifyRow(name, len(prompt), prompt, start=self._starts[name], next_budget=self._budget)

    def _preempt(self, name: SequenceId) -> None:
        """Release a sequence and open it again, as if others needed its blocks for a moment."""
        text, start = tuple(self._texts[name]), self._starts[name]
        self._engine.release([name])
        self._idle()
        (stored,) = self._engine.open([OpenRow(name, text, start)]).stored_lens
        begun = None if stored else start
        self._rows[name] = VerifyRow(name, len(text), text[stored:], start=begun, next_budget=self._budget)

    def _commit(self, batch: StepBatch, result: StepResult) -> None:
        self.occupancies.append(result.kv)
        self.proposals += [verdict.proposal for verdict in result.verdicts]
        if self._draw.random() < 0.3:
            self._budget = self._draw.choice(self._budgets)
        for row, verdict in zip(batch.rows, result.verdicts, strict=True):
            assert verdict.fault is None
            self.accepted += verdict.accepted
            self._texts[row.sequence_id] += verdict.tokens
            if len(self._texts[row.sequence_id]) > LONGEST:
                del self._rows[row.sequence_id]
                self._engine.release([row.sequence_id])
                continue
            other = TokenTree.chain((7, 8, 9)) if self._draw.random() < 0.05 else None
            self._rows[row.sequence_id] = replace(following(row, verdict, other), next_budget=self._budget)


@pytest.mark.parametrize("change", ["a row less", "a row more", "another draft", "another order", "the rows again"])
def test_other_rows_are_computed_as_if_nothing_was_launched(watched: Watched, change: str) -> None:
    rows = [first_row(name, (*PROMPT, index)) for index, name in enumerate("abc")]
    verdicts, _ = watched.step(*rows)
    others = {
        "a row less": [following(*one) for one in zip(rows[:2], verdicts[:2], strict=True)],
        "a row more": [*map(following, rows, verdicts), first_row("d", PROMPT)],
        "another draft": [following(*one, TokenTree.chain((5,))) for one in zip(rows, verdicts, strict=True)],
        "another order": [following(*one) for one in zip(rows[::-1], verdicts[::-1], strict=True)],
        "the rows again": rows,
    }[change]
    expected, _ = watched.step(*others)
    free = watched.pool.blocks_free
    watched.engine.release_all()
    assert watched.step(*rows)[0] == verdicts
    watched.engine.step_ahead()
    found, happened = watched.step(*others)
    assert found == expected
    assert happened == ([] if change == "the rows again" else ["launch", "read"])
    assert watched.pool.blocks_free == free


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    ("is_shown", "expected", "asked", "is_lost"),
    [
        (False, NO_DRAFT, BUDGET, False),
        (False, BUDGET, NO_DRAFT, False),
        (True, BUDGET, DraftBudget(2, 2), False),
        (True, BUDGET, NO_DRAFT, False),
        (True, BUDGET, EVIDENCE_ONLY, False),
        (True, EVIDENCE_ONLY, NO_DRAFT, False),
        (True, NO_DRAFT, EVIDENCE_ONLY, True),
        (True, EVIDENCE_ONLY, BUDGET, True),
    ],
)
def test_a_launched_step_drafts_what_its_rows_ask_for_if_it_has_recorded_enough(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_shown: bool,
    expected: DraftBudget,
    asked: DraftBudget,
    is_lost: bool,
) -> None:
    """A method that is shown nothing drafts after any pass."""
    found: list[Any] = []
    for is_ahead in (False, True):
        watched = Watched(directory, monkeypatch, Shown() if is_shown else ngram(directory))
        row = replace(first_row("a", PROMPT * 2), next_budget=expected)
        (verdict,), _ = watched.step(row)
        if is_ahead:
            watched.engine.step_ahead()
        row = replace(following(row, verdict), next_budget=asked)
        (verdict,), happened = watched.step(row)
        assert happened == (["read"] if is_ahead and not is_lost else ["launch", "read"])
        assert watched.step(row)[0] == (verdict,), "the row is known as it was sent"
        row = replace(following(row, verdict), next_budget=BUDGET)
        found.append([verdict, watched.step(row)[0]])
        assert (verdict.proposal is not None) == (asked.max_nodes > 0)
    assert found[0] == found[1]


def test_what_happens_between_steps_sees_no_block_of_the_launched_one(watched: Watched) -> None:
    """The last block is full, so the launched step has taken one more."""
    row = first_row("a", PROMPT)
    (verdict,), _ = watched.step(row)
    free = watched.pool.blocks_free
    for call in (watched.engine.info, lambda: watched.engine.open([open_row("b", (*PROMPT, 4), parent="a")])):
        (verdict,), _ = watched.step(row)
        watched.engine.step_ahead()
        assert watched.pool.blocks_free < free
        call()
        assert watched.pool.blocks_free == free
        assert not watched.engine.step_ahead()
        assert watched.pool.blocks_free == free, "the rows are not known any more"
        watched.engine.release_all()
        assert watched.step(row)[0] == (verdict,)


def test_a_release_drops_a_step_with_the_sequence_alone(watched: Watched) -> None:
    rows = [first_row("a", PROMPT), first_row("b", (*PROMPT, 7))]
    verdicts, _ = watched.step(*rows)
    watched.engine.step_ahead()
    watched.engine.release([SequenceId("another")])
    next_rows = [following(*one) for one in zip(rows, verdicts, strict=True)]
    later, happened = watched.step(*next_rows)
    assert happened == ["read"]
    watched.engine.step_ahead()
    watched.engine.release([SequenceId("a")])
    _, happened = watched.step(following(next_rows[1], later[1]))
    assert happened == ["launch", "read"]


def test_a_full_pool_launches_nothing_and_the_step_itself_says_so(watched: Watched) -> None:
    rows = [first_row("a", PROMPT), first_row("b", PROMPT[::-1])]
    verdicts, _ = watched.step(*rows)
    held = watched.pool.new_table()
    watched.pool.reserve(held, 4 * (watched.pool.blocks_free - 1))  # one of both sequences finds a block
    watched.events.clear()
    watched.engine.step_ahead()
    assert not watched.events
    assert watched.pool.blocks_free == 1
    found, _ = watched.step(*[following(*one) for one in zip(rows, verdicts, strict=True)])
    assert [one.fault is None for one in found] == [True, False]


def test_a_launch_that_fails_frees_its_blocks_and_the_next_step_is_computed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = first_row("a", PROMPT)
    (verdict,), _ = watched.step(row)
    free = watched.pool.blocks_free
    with monkeypatch.context() as patch:
        patch.setattr(watched.engine, "_launch_decisions", Mock(side_effect=RuntimeError("lost")))
        with pytest.raises(RuntimeError, match="lost"):
            watched.engine.step_ahead()
    assert watched.pool.blocks_free == free
    _, happened = watched.step(following(row, verdict))
    assert happened == ["launch", "read"]


@pytest.mark.usefixtures("_at_once")
def test_an_engine_that_does_not_go_ahead_launches_nothing(engine: TargetEngine) -> None:
    engine.step(StepBatch((first_row("a", PROMPT),)))
    free = engine.info().kv
    assert not engine.goes_ahead
    assert not engine.step_ahead()
    assert engine.info().kv == free


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({"step_ahead": "on"}, "cuda", True),
        ({}, "cuda", False),
        ({"step_ahead": "on"}, "cpu", False),
        ({"step_ahead": "on", "tensor_parallel": 2}, "cuda", False),
    ],
)
def test_a_target_on_one_gpu_goes_ahead_if_it_is_told_to(settings: dict[str, Any], device: str, expected: bool) -> None:
    assert goes_ahead(TargetSection(**settings), torch.device(device)) is expected


def on_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TargetEngine, KvPool, FakeGpu]:
    """An engine that goes ahead, with offloaded blocks, and the GPU that computes its passes."""
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    pool = KvPool(model.kv_spec, KvSection(block_size=4, host_bytes=1 << 20), BLOCKS)
    engine, gpu = TargetEngine(model, pool, LocalDecider(), EngineOptions(goes_ahead=True)), FakeGpu()
    gpu.computes_for(engine, monkeypatch)
    return engine, pool, gpu


@pytest.mark.usefixtures("_at_once")
def test_the_cost_of_computing_is_that_of_the_steps_own_pass(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU still computes a pass that was launched ahead when other rows come; a prompt chunk is not waited for."""
    engine, pool, _ = on_gpu(directory, monkeypatch)
    noted: list[Any] = []
    assert pool.tiers is not None
    monkeypatch.setattr(pool.tiers.costs, "record_compute", lambda *numbers: noted.append(numbers))
    row = first_row("a", range(3, 43))
    (verdict,) = engine.step(StepBatch((row,))).verdicts
    row = following(row, verdict)
    engine.step_ahead()
    engine.step(StepBatch((row,)))
    assert noted == [(40, 40, pytest.approx(0.04)), (1, 0, pytest.approx(0.001))]
    engine.step_ahead()
    other = first_row("b", range(4, 44))
    engine.step(StepBatch((replace(other, base_len=30, pending=other.pending[:30], decide=False),)))
    assert len(noted) == 2, "it is not computed yet"
    engine.step(StepBatch((replace(other, pending=other.pending[30:], start=None),)))
    assert noted[2:] == [(30, 30, pytest.approx(0.03)), (10, 10, pytest.approx(0.01))]
    engine.close()


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("gap", [0.0, 0.0004, 0.005], ids=["no wait for the rows", "a short one", "a long one"])
def test_a_step_takes_its_own_time_whenever_it_is_launched(
    directory: Path, monkeypatch: pytest.MonkeyPatch, gap: float
) -> None:
    """The device computes 1 ms for each token. The wait for rows is not the target's, and no lost pass is a step's."""
    engine, _, gpu = on_gpu(directory, monkeypatch)
    row = first_row("a", range(3, 43))
    result = engine.step(StepBatch((row,)))
    assert result.step_seconds == pytest.approx(0.04)
    for _ in range(3):
        engine.step_ahead()
        gpu.now += gap
        row = following(row, result.verdicts[0])
        result = engine.step(StepBatch((row,)))
        assert result.step_seconds == pytest.approx(0.001)
    engine.step_ahead()
    gpu.now += gap
    assert engine.step(StepBatch((first_row("b", range(4, 34)),))).step_seconds == pytest.approx(0.03)
    engine.close()


@pytest.mark.usefixtures("_at_once")
def test_no_step_takes_less_than_nothing_where_a_lost_pass_outlasts_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator refuses such a time. The GPU is done after the step and before its result is made."""
    engine, pool, gpu = on_gpu(directory, monkeypatch)
    row = first_row("a", range(3, 43))
    row = following(row, engine.step(StepBatch((row,))).verdicts[0])
    engine.step_ahead()
    occupancy = pool.occupancy

    def later() -> KvOccupancy:
        gpu.wait()
        return occupancy()

    monkeypatch.setattr(pool, "occupancy", later)
    result = engine.step(StepBatch((replace(row, sequence_id=SequenceId("unknown")),)))
    assert result.verdicts[0].fault is not None
    assert result.step_seconds == 0.0
    engine.close()
