"""Rows are repeated, out of sync, split into chunks or refused. A bad row never affects the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import RowFaultCode
from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_rows import PROMPT, SAMPLED, decode, first_row, open_engine, verify
from tests.support.engines.engine_sequence import GREEDY
from tests.support.models import tiny
from workers.forward.loaded_model import LoadedModel
from workers.forward.native.decoder import NativeDecoder
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.verify.decider import LocalDecider
from workers.verify.engine import TargetEngine


def test_a_repeated_row_repeats_its_verdict(engine: TargetEngine) -> None:
    prompt = first_row("a", PROMPT)
    first = verify(engine, prompt)
    assert verify(engine, prompt) == first
    row = VerifyRow(SequenceId("a"), len(PROMPT) + 1, first.tokens, TokenTree.chain((4, 5)))
    assert verify(engine, row) == verify(engine, row)


def test_a_row_out_of_sync_reports_how_many_tokens_are_stored(engine: TargetEngine) -> None:
    unknown = verify(engine, VerifyRow(SequenceId("a"), 9, (1,)))
    assert unknown.fault is not None
    assert (unknown.fault.code, unknown.fault.stored_len) == (RowFaultCode.OUT_OF_SYNC, 0)
    verify(engine, first_row("a", PROMPT))
    ahead = verify(engine, VerifyRow(SequenceId("a"), 20, (1, 2)))
    assert ahead.fault is not None
    assert (ahead.fault.code, ahead.fault.stored_len) == (RowFaultCode.OUT_OF_SYNC, len(PROMPT))


def test_a_sequence_that_is_sent_again_from_the_start_continues_as_before(
    engine: TargetEngine, directory: Path
) -> None:
    plain = decode(engine, PROMPT, 20, SAMPLED)
    restarted = open_engine(directory)
    known = (*PROMPT, *plain[:9])
    verdict = verify(
        restarted, VerifyRow(SequenceId("a"), len(known), known, start=SequenceStart(len(PROMPT), SAMPLED))
    )
    assert verdict.tokens == (plain[9],)


def test_a_prompt_in_chunks_has_a_decision_only_at_its_end(engine: TargetEngine) -> None:
    whole = verify(engine, first_row("whole", PROMPT))
    start = SequenceStart(len(PROMPT), GREEDY)
    early = verify(engine, VerifyRow(SequenceId("a"), 5, PROMPT[:5], decide=False, start=start))
    assert early.tokens == ()
    assert verify(engine, VerifyRow(SequenceId("a"), len(PROMPT), PROMPT[5:])).tokens == whole.tokens


def test_one_row_out_of_memory_does_not_stop_the_others(directory: Path) -> None:
    engine = open_engine(directory, blocks=6)
    long = first_row("long", [3] * 100)
    verdicts = engine.step(StepBatch((first_row("a", PROMPT), long))).verdicts
    assert verdicts[0].fault is None
    assert verdicts[1].fault is not None
    assert verdicts[1].fault.code is RowFaultCode.KV_EXHAUSTED
    engine.release([SequenceId("a"), SequenceId("long")])
    assert engine.info().kv.blocks_free == 6


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (first_row("bad", (5, tiny.VOCABULARY)), "pending: token 96 must be below the vocabulary size 96"),
        (
            VerifyRow(SequenceId("bad"), 2, (5, 6), TokenTree.chain((99,)), start=SequenceStart(2, GREEDY)),
            "tree.tokens: token 99 must be below",
        ),
        (first_row("bad", [5] * 257), "beyond the context of 256 tokens"),
        (VerifyRow(SequenceId("bad"), 1, ()), "pending: it must hold at least one token"),
        (
            VerifyRow(SequenceId("bad"), 1, (4,), TokenTree.chain((5,)), False, SequenceStart(1, GREEDY)),
            "tree: it must be empty where nothing is decided",
        ),
    ],
)
def test_a_bad_row_is_the_only_fault(engine: TargetEngine, row: VerifyRow, message: str) -> None:
    good = verify(engine, first_row("alone", PROMPT))
    bad, beside = engine.step(StepBatch((row, first_row("a", PROMPT)))).verdicts
    assert bad.fault is not None
    assert bad.fault.code is RowFaultCode.INVALID
    assert message in bad.fault.message
    assert beside.tokens == good.tokens


def test_a_tree_with_more_nodes_than_the_context_has_tokens_left_is_served_if_it_is_no_deeper(
    engine: TargetEngine,
) -> None:
    last = verify(engine, first_row("a", [5] * 254)).tokens
    wide = VerifyRow(SequenceId("a"), 255, last, TokenTree((1, 2, 3), (-1, -1, -1)))
    deep = replace(wide, tree=TokenTree.chain((1, 2)))
    refused, served = verify(engine, deep), verify(engine, wide)
    assert refused.fault is not None and "beyond the context of 256 tokens" in refused.fault.message
    assert served.fault is None and served.tokens
    engine.release_all()


def test_two_rows_of_one_sequence_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="in one row only"):
        StepBatch((first_row("a", PROMPT), first_row("a", PROMPT)))


def load_poisoned(directory: Path) -> LoadedModel:
    """The model with an embedding of token 50 that is no number."""
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    assert isinstance(model.native, NativeDecoder) and model.native._embedding is not None
    model.native._embedding[50] = float("nan")
    return model


def test_logits_without_a_number_fail_their_own_request(engine: TargetEngine, directory: Path) -> None:
    model = load_poisoned(directory)
    poisoned = TargetEngine(model, KvPool(model.kv_spec, KvSection(block_size=4), blocks=50), LocalDecider())
    bad, good = poisoned.step(StepBatch((first_row("bad", (5, 50)), first_row("good", PROMPT)))).verdicts
    assert bad.fault is not None
    assert bad.fault.code is RowFaultCode.INVALID
    assert good.tokens == verify(engine, first_row("good", PROMPT)).tokens


def test_nan_in_released_blocks_does_not_reach_later_sequences(directory: Path) -> None:
    model = load_poisoned(directory)
    poisoned = TargetEngine(model, KvPool(model.kv_spec, KvSection(block_size=4), blocks=8), LocalDecider())
    healthy = verify(open_engine(directory), first_row("a", PROMPT)).tokens
    bad = verify(poisoned, first_row("bad", [5, 7, 9, 50] * 8))
    assert bad.fault is not None
    poisoned.release([SequenceId("bad")])
    for length in (len(PROMPT), 5, 1):  # blocks used before: full, half-filled, single and as padding
        row = first_row("a", PROMPT[:length])
        assert verify(poisoned, row).fault is None
    assert verify(poisoned, first_row("b", PROMPT)).tokens == healthy
