"""A step that is launched before its rows come changes no token, whatever comes in its place."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection, TargetSection
from cluster.core.drafting import NO_DRAFT, DraftBudget, Proposal, RowFault, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.ports import DraftMethod
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import OpenRow, StepBatch, StepResult, Verdict, VerifyRow
from tests.support.engines.engine_rows import PROMPT, first_row, open_row
from tests.support.fakes.fake_gpu import FakeGpu
from tests.support.models import tiny
from workers.draft.registry import create
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration
from workers.verify import ahead
from workers.verify.ahead import LaunchedRows, LaunchedStep, StepsAhead
from workers.verify.build import goes_ahead
from workers.verify.decider import LocalDecider
from workers.verify.engine import EngineOptions, TargetEngine
from workers.verify.walk import TreeWalk

BUDGET = DraftBudget(4, 4)
SAMPLINGS = (SamplingParameters(temperature=0.0), SamplingParameters(temperature=0.8, top_p=0.9, seed=5))
BLOCKS, LONGEST = 200, 100


class Watched:
    """An engine of which it is known when it launches passes and when it waits for their decisions."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, method: DraftMethod | None = None) -> None:
        model = load_model(ModelSection(path=str(directory), device="cpu"))
        self.pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=BLOCKS)
        self.engine = TargetEngine(model, self.pool, LocalDecider(), EngineOptions(method=method, goes_ahead=True))
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
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("seed", range(3))
def test_streams_and_blocks_are_the_same_whatever_comes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, seed: int, drafts: bool
) -> None:
    """Sequences begin, end, are preempted and opened again, and have other drafts than those that were proposed."""
    budget = BUDGET if drafts else NO_DRAFT
    found: list[Any] = []
    for is_ahead in (False, True):
        watched = Watched(directory, monkeypatch, ngram(directory) if drafts else None)
        coordinator = Coordinator(watched, random.Random(seed), budget, goes_ahead=is_ahead)
        found.append([coordinator.run(rounds=70), coordinator.occupancies])
        assert coordinator.ahead > 20 if is_ahead else not coordinator.ahead
        assert coordinator.accepted or not drafts
        kv = watched.engine.release_all()
        assert kv.blocks_free == kv.blocks_total
    assert found[0] == found[1]


class Coordinator:
    """Sends rows as a coordinator does, with all that may happen to sequences. It draws the same for equal verdicts."""

    def __init__(self, watched: Watched, draw: random.Random, budget: DraftBudget, *, goes_ahead: bool) -> None:
        self._watched, self._engine, self._draw, self._budget = watched, watched.engine, draw, budget
        self._goes_ahead = goes_ahead
        self._texts: dict[SequenceId, list[int]] = {}
        self._starts: dict[SequenceId, SequenceStart] = {}
        self._rows: dict[SequenceId, VerifyRow] = {}
        self.occupancies: list[KvOccupancy] = []
        self.ahead = self.accepted = 0

    def run(self, rounds: int) -> dict[SequenceId, list[int]]:
        """The texts after so many rounds."""
        for _ in range(rounds):
            self._change()
            self._idle()
            batch = StepBatch(tuple(self._rows.values()))
            self._watched.events.clear()
            result = self._engine.step(batch)
            self.ahead += self._watched.events == ["read"]
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
        for row, verdict in zip(batch.rows, result.verdicts, strict=True):
            assert verdict.fault is None
            self.accepted += verdict.accepted
            self._texts[row.sequence_id] += verdict.tokens
            if len(self._texts[row.sequence_id]) > LONGEST:
                del self._rows[row.sequence_id]
                self._engine.release([row.sequence_id])
                continue
            other = TokenTree.chain((7, 8, 9)) if self._draw.random() < 0.05 else None
            self._rows[row.sequence_id] = following(row, verdict, other)


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


def rows_and_verdicts(count: int, base_len: int = 5) -> tuple[StepBatch, list[Verdict]]:
    names = [SequenceId(str(index)) for index in range(count)]
    return (
        StepBatch(tuple(VerifyRow(name, base_len, (3,)) for name in names)),
        [Verdict(name, base_len, (3,)) for name in names],
    )


def sequences(count: int, end: int = 2) -> Any:
    stored = SimpleNamespace(start=SequenceStart(1, SamplingParameters(end_token_ids=(end,))))
    return {SequenceId(str(index)): stored for index in range(count)}


def launched(batch: StepBatch) -> LaunchedStep:
    unused = cast("Any", None)
    return LaunchedStep(0.0, {}, LaunchedRows([], unused, [], unused, unused))


def test_steps_are_launched_while_nearly_all_come_as_expected() -> None:
    steps, forgotten = StepsAhead(lambda ready: forgotten.append(ready), is_on=True), list[Any]()

    def go(count: int, *, as_expected: bool = True) -> int:
        """How many of so many steps were launched ahead and used."""
        used = 0
        for number in range(count):
            batch, verdicts = rows_and_verdicts(2, 5 + number)
            steps.end(batch, verdicts)
            expected = steps.expect(sequences(2))
            if expected is not None:
                steps.hold(launched(expected))
            used += steps.take(rows_and_verdicts(2 if as_expected else 1, 6 + number)[0]) is not None
        return used

    assert go(150) == 0, "too little is known"
    assert go(100) > 40
    assert go(20, as_expected=False) == 0
    assert len(forgotten) < 5, "so few passes are lost"
    assert go(30) == 0
    assert go(300) > 100


@pytest.mark.parametrize("change", ["opens", "releases"])
def test_steps_that_other_calls_would_drop_count_as_not_expected(change: str) -> None:
    """While nothing is launched too: half of the launched ones would be lost."""
    steps, lost = StepsAhead(lambda _: None, is_on=True), 0
    for number in range(400):
        steps.end(*rows_and_verdicts(2, 5 + number))
        expected = steps.expect(sequences(2))
        if expected is not None:
            steps.hold(launched(expected))
        if number % 2:
            lost += expected is not None
            steps.drop() if change == "opens" else steps.release([SequenceId("1")])
            steps.expect(sequences(1))
        steps.take(rows_and_verdicts(1 if number % 2 else 2, 6 + number)[0])
    assert not lost


@pytest.mark.parametrize(("rows", "looked_at"), [(1, 36), (7, 36), (16, 12), (64, 4)])
def test_fewer_steps_of_many_rows_are_looked_at_while_few_come_as_expected(rows: int, looked_at: int) -> None:
    """What is found of a step delays its verdicts, which another thread sends."""
    steps, seen = StepsAhead(lambda _: None, is_on=True), 0
    stored = Mock(get=Mock(return_value=None))
    for number in range(36):
        steps.end(*rows_and_verdicts(rows, 5 + number))
        stored.get.reset_mock()
        assert steps.expect(stored) is None
        seen += stored.get.call_count > 0
        steps.take(rows_and_verdicts(rows, 6 + number)[0])
    assert seen == looked_at


def test_what_verdicts_do_not_say_is_not_expected() -> None:
    """A coordinator leaves out sequences that have ended, and those that it has released."""
    steps = StepsAhead(lambda _: None, is_on=True)
    batch, verdicts = rows_and_verdicts(3)

    def expected(verdicts: Sequence[Verdict], stored: Any) -> list[str] | None:
        steps.end(batch, verdicts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ahead, "LEAST_SHARE", 0.0)
            found = steps.expect(stored)
        return None if found is None else [row.sequence_id for row in found.rows]

    fault = RowFault(RowFaultCode.OUT_OF_SYNC, "")
    assert expected(verdicts, sequences(3)) == ["0", "1", "2"]
    assert expected(verdicts, sequences(2)) == ["0", "1"]
    assert expected([*verdicts[:2], Verdict(SequenceId("2"), 5, (2,))], sequences(3)) == ["0", "1"]
    assert expected(verdicts, sequences(3, end=3)) is None, "all have ended"
    for unknown in (Verdict(SequenceId("2"), 5), Verdict(SequenceId("2"), 5, fault=fault)):
        assert expected([*verdicts[:2], unknown], sequences(3)) is None, "nothing is decided"
    assert expected([*verdicts[:2], Verdict(SequenceId("2"), 5, (4,), forced=(9,))], sequences(3)) is None


def test_the_draft_of_a_verdict_is_expected_with_the_budget_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LEAST_SHARE", 0.0)
    steps, name, tree = StepsAhead(lambda _: None, is_on=True), SequenceId("0"), TokenTree.chain((8, 9))
    row = VerifyRow(name, 5, (3,), TokenTree.chain((4, 6)), next_budget=BUDGET)
    steps.end(StepBatch((row,)), [Verdict(name, 5, (4, 7), 2, proposal=Proposal(name, 7, tree))])
    assert steps.expect(sequences(1)) == StepBatch((VerifyRow(name, 7, (7,), tree, next_budget=BUDGET),))


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
