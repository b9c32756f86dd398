"""Shared KV changes no token: repeated prompts, common prefixes and parents."""

from __future__ import annotations

from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_sequence import GREEDY, drafts_near, generate, sequence_on, some_tokens
from tests.support.models.model_cases import ModelCase


def test_a_repeated_prompt_is_a_hit_and_has_the_same_answer(case: ModelCase) -> None:
    prompt = some_tokens(37)
    engine = case.engine()
    fresh = generate(engine, prompt, 40)
    again = sequence_on(engine, prompt)
    assert again.open() == 36
    assert again.decode(40, drafts_near([*prompt, *fresh])) == fresh
    engine.release([again.name])
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


def test_in_the_next_turn_the_whole_conversation_is_a_hit(case: ModelCase) -> None:
    prompt = some_tokens(21)
    engine = case.engine()
    fresh = generate(engine, prompt, 30, propose=drafts_near(some_tokens(60)))
    following = [*prompt, *fresh, *some_tokens(9, seed=8)]
    index = sequence_on(engine, following, "b")
    assert index.open() == 48
    assert index.decode(20) == generate(case.engine(prefix_cache=False), following, 20)


def test_running_prompts_share_their_common_prefix(case: ModelCase) -> None:
    common = some_tokens(18)
    engine = case.engine()
    plain = case.engine(prefix_cache=False)
    sequences = []
    for place in range(3):
        sequence = sequence_on(engine, [*common, *some_tokens(9, seed=20 + place)], f"s{place}")
        assert sequence.open() == (16 if place else 0)
        sequence.step()
        sequences.append(sequence)
    for sequence in sequences:
        prompt = sequence.tokens[:27]
        sequence.decode(20)
        assert sequence.tokens[27:47] == generate(plain, prompt, 20)


def test_requests_with_different_cache_salts_share_nothing(case: ModelCase) -> None:
    prompt = some_tokens(37)
    engine = case.engine()
    fresh = generate(engine, prompt, 10, salt="one")
    other = sequence_on(engine, prompt, "b", salt="two")
    assert other.open() == 0
    assert other.decode(10) == fresh
    own = sequence_on(engine, prompt, "c", salt="one")
    assert own.open() == 36
    child = sequence_on(engine, prompt, "d", salt="three")
    assert child.open(parent="c") == 0


def test_without_the_prefix_cache_only_parents_share_blocks(case: ModelCase) -> None:
    prompt = some_tokens(37)
    engine = case.engine(prefix_cache=False)
    generate(engine, prompt, 3)
    first = sequence_on(engine, prompt)
    assert first.open() == 0
    first.step()
    assert sequence_on(engine, prompt, "b").open(parent="a") == 36
    assert sequence_on(engine, prompt, "c").open() == 0


def test_a_row_from_position_zero_does_not_search_the_cache(full: ModelCase) -> None:
    prompt = some_tokens(20)
    engine = full.engine()
    fresh = generate(engine, prompt, 1)
    row = VerifyRow(SequenceId("a"), 20, tuple(prompt), start=SequenceStart(20, GREEDY))
    assert list(engine.step(StepBatch((row,))).verdicts[0].tokens) == fresh
