"""Sequences are opened and released. Children share the KV of their parent."""

from __future__ import annotations

from cluster.core.ids import SequenceId
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_rows import PROMPT, first_row, open_row, verify
from workers.verify.engine import TargetEngine


def test_children_share_the_prompt_and_continue_independently(engine: TargetEngine) -> None:
    verify(engine, first_row("parent", PROMPT))
    free = engine.info().kv.blocks_free
    children = [("left", (*PROMPT, 20)), ("right", (*PROMPT, 30))]
    opened = engine.open([open_row(name, tokens, parent="parent") for name, tokens in children])
    assert opened.stored_lens == (len(PROMPT), len(PROMPT))
    assert opened.kv.blocks_free == free
    rows = [VerifyRow(SequenceId(name), len(tokens), tokens[-1:]) for name, tokens in children]
    for (_, tokens), verdict in zip(children, engine.step(StepBatch(tuple(rows))).verdicts, strict=True):
        assert verdict.tokens == verify(engine, first_row("fresh", tokens)).tokens
    engine.release([SequenceId(name) for name in ("parent", "left", "right", "fresh")])
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


def test_a_child_shares_its_parents_half_filled_block_without_its_own_last_token(engine: TargetEngine) -> None:
    verify(engine, first_row("parent", (*PROMPT, 7, 7)))
    opened = engine.open(
        [
            open_row("further", (*PROMPT, 7, 7, 8), parent="parent"),
            open_row("same", (*PROMPT, 7, 7), parent="parent"),
            open_row("apart", (*PROMPT[:6], 1, 1), parent="parent"),
        ]
    )
    assert opened.stored_lens == (10, 9, 6)


def test_a_repeated_open_has_the_same_result(engine: TargetEngine) -> None:
    verify(engine, first_row("parent", PROMPT))
    row = open_row("child", (*PROMPT, 20), parent="parent")
    first = engine.open([row])
    assert engine.open([row]) == first
    verify(engine, VerifyRow(SequenceId("child"), len(PROMPT) + 1, (20,)))
    assert engine.open([row]).stored_lens == first.stored_lens  # opened again after it has changed


def test_a_sequence_that_is_opened_again_keeps_its_stored_tokens(engine: TargetEngine) -> None:
    verdict = verify(engine, first_row("a", (*PROMPT, 7)))
    opened = engine.open([open_row("a", (*PROMPT, 7, *verdict.tokens), parent="long gone")])
    assert opened.stored_lens == (len(PROMPT) + 1,)


def test_release_all_frees_every_sequence(engine: TargetEngine) -> None:
    verify(engine, first_row("a", PROMPT))
    verify(engine, first_row("b", PROMPT))
    kv = engine.release_all()
    assert kv.blocks_free == kv.blocks_total
