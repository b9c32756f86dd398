"""`TargetService` over an engine: verdicts, faults and errors on the wire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import RowFault, RowFaultCode
from cluster.core.errors import InvalidRequest, TargetUnavailable, WorkerUnavailable
from cluster.core.ids import SequenceId
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, StepResult, Verdict
from tests.support.fakes.echo_workers import KV, POISON, EchoEngine, open_row, step, target_at, verify_row
from tests.support.models import tiny
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve.target_servicer import TargetServicer
from workers.verify.decider import LocalDecider
from workers.verify.engine import TargetEngine


def open_engine(directory: Path) -> TargetEngine:
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    return TargetEngine(model, KvPool(model.kv_spec, KvSection(block_size=4), blocks=20), LocalDecider())


async def test_verdicts_arrive_as_the_engine_returned_them(directory: Path) -> None:
    batch = StepBatch((verify_row("a", 5, 6, 7), verify_row("b", 9), verify_row("c", tiny.VOCABULARY)))
    expected = open_engine(directory).step(batch)
    async with target_at(TargetServicer(open_engine(directory))) as target:
        info = await target.info()
        assert (info.vocabulary_size, info.kv.blocks_free) == (tiny.VOCABULARY, 20)
        first = await target.step(batch)
        assert (first.verdicts, first.kv) == (expected.verdicts, expected.kv)
        assert (await target.step(batch)).verdicts == expected.verdicts
        opened = await target.open([open_row("child", 5, 6, 7, 8, parent="a"), open_row("new", 1)])
        assert opened.stored_lens == (3, 0)
        await target.release([SequenceId("a"), SequenceId("b"), SequenceId("child"), SequenceId("unknown")])
        assert (await target.info()).kv.blocks_free == 20


async def test_a_row_that_makes_the_engine_raise_is_the_only_fault_and_the_times_add_up() -> None:
    engine = EchoEngine()
    servicer = TargetServicer(engine)
    result = await step(servicer, verify_row("a", 1), verify_row("b", POISON), verify_row("c", 3))
    await servicer.close()
    assert engine.sizes == [3, 1, 1, 1]
    assert [verdict.tokens for verdict in result.verdicts] == [(1,), (), (3,)]
    assert [verdict.fault and verdict.fault.code for verdict in result.verdicts] == [None, RowFaultCode.INVALID, None]
    assert (result.kv, result.step_seconds, result.draft_seconds) == (KV, 1.0, 0.25)


async def test_an_engine_that_fails_every_row_is_unavailable_and_serves_the_next_step() -> None:
    async with target_at(TargetServicer(EchoEngine())) as target:
        with pytest.raises(WorkerUnavailable):
            await target.step(StepBatch((verify_row("a", POISON),)))
        assert (await target.step(StepBatch((verify_row("a", 1),)))).verdicts[0].tokens == (1,)


class UncomputedEngine(EchoEngine):
    """Raises like `EchoEngine`, and says of the sequence "late" that it is not ready, which takes no computation."""

    def step(self, batch: StepBatch) -> StepResult:
        late = [row for row in batch.rows if row.sequence_id.endswith("late")]
        result = super().step(StepBatch(tuple(row for row in batch.rows if row not in late)))
        fault = RowFault(RowFaultCode.NOT_READY, "its grammar is being compiled")
        found = {verdict.sequence_id: verdict for verdict in result.verdicts}
        found |= {row.sequence_id: Verdict(row.sequence_id, row.base_len, fault=fault) for row in late}
        return replace(result, verdicts=tuple(found[row.sequence_id] for row in batch.rows))


async def test_a_row_that_needs_no_computation_does_not_show_that_the_others_are_bad() -> None:
    servicer = TargetServicer(UncomputedEngine())
    with pytest.raises(RuntimeError, match="poisoned"):
        await step(servicer, verify_row("late", 1), verify_row("a", POISON), verify_row("b", POISON))
    assert servicer.failures == 1
    result = await step(servicer, verify_row("late", 1), verify_row("a", POISON), verify_row("b", 1))
    await servicer.close()
    codes = [verdict.fault and verdict.fault.code for verdict in result.verdicts]
    assert codes == [RowFaultCode.NOT_READY, RowFaultCode.INVALID, None]


@pytest.mark.parametrize("others", [(), ("b", "c")], ids=["alone", "beside others"])
async def test_a_draft_that_cannot_be_computed_costs_no_verdict(others: tuple[str, ...]) -> None:
    class Treeless(EchoEngine):
        def step(self, batch: StepBatch) -> StepResult:
            if any(POISON in row.tree.tokens for row in batch.rows):
                raise RuntimeError("poisoned tree")
            result = super().step(batch)
            drafted = (
                replace(one, drafted=len(row.tree)) for one, row in zip(result.verdicts, batch.rows, strict=True)
            )
            return replace(result, verdicts=tuple(drafted))

    servicer = TargetServicer(Treeless())
    rows = [replace(verify_row("a", 5, 6), tree=TokenTree.chain([POISON, 1]))]
    rows += [replace(verify_row(name, 7), tree=TokenTree.chain([3])) for name in others]
    result = await step(servicer, *rows)
    await servicer.close()
    assert [(verdict.tokens, verdict.drafted) for verdict in result.verdicts] == [((6,), 0), *[((7,), 1)] * len(others)]
    assert servicer.failures == 0


async def test_a_broken_group_fails_the_step_at_once_without_retrying_single_rows() -> None:
    class Broken(EchoEngine):
        def step(self, batch: StepBatch) -> StepResult:
            self.sizes.append(len(batch.rows))
            raise TargetUnavailable("the tensor-parallel group is broken")

    engine = Broken()
    async with target_at(TargetServicer(engine)) as target:
        with pytest.raises(TargetUnavailable, match="group is broken"):
            await target.step(StepBatch((verify_row("a", 1), verify_row("b", 1))))
    assert engine.sizes == [2]


async def test_errors_of_the_engine_arrive_as_they_were_raised() -> None:
    async with target_at(TargetServicer(EchoEngine())) as target:
        with pytest.raises(InvalidRequest, match=r"parent: .*unknown. is refused"):
            await target.open([open_row("child", 1, parent="unknown")])
        with pytest.raises(InvalidRequest, match="tokens"):
            await target.open([open_row("child")])


@pytest.mark.parametrize("goes_ahead", [False, True])
async def test_an_engine_that_goes_ahead_launches_steps_while_no_call_waits(goes_ahead: bool) -> None:
    class Ahead(EchoEngine):
        launches = 0

        @property
        def goes_ahead(self) -> bool:
            return goes_ahead

        def step_ahead(self) -> bool:
            self.launches += 1
            return False

    engine = Ahead()
    servicer = TargetServicer(engine)
    for token in (1, 2):
        assert (await step(servicer, verify_row("a", token))).verdicts[0].tokens == (token,)
    await servicer.close()
    assert engine.launches <= 2
    assert (engine.launches > 0) is goes_ahead
