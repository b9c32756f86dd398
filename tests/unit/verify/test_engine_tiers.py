"""KV that is evicted, loaded back from the tiers, or lost changes no token."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.config.target_section import KvSection, TargetSection
from cluster.core.drafting import RowFaultCode
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_sequence import (
    GREEDY,
    EngineSequence,
    Propose,
    drafts_near,
    generate,
    sequence_on,
    some_tokens,
)
from tests.support.models import tiny
from tests.support.models.model_cases import BLOCK, WINDOW, ModelCase, save_case
from workers.kv import block_table
from workers.kv.load_cost import Medium
from workers.kv.pool import KvPool
from workers.kv.tiers import Tiers
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("moved_out", [False, True], ids=["dropped", "moved out"])
def test_prompts_for_several_pools_are_all_answered_correctly(case: ModelCase, moved_out: bool) -> None:
    engine = case.engine(blocks=26 * case.layout().tables, host_bytes=(1 << 20) if moved_out else 0)
    plain = case.engine(prefix_cache=False)
    prompts = [some_tokens(41, seed=seed % 6) for seed in range(18)]
    expected = {seed: generate(plain, prompts[seed], 12) for seed in range(6)}
    hits = 0
    for index, prompt in enumerate(prompts):
        sequence = sequence_on(engine, prompt, f"s{index}", sampling=GREEDY)
        hits += sequence.open() > 0
        assert sequence.decode(12, drafts_near([*prompt, *expected[index % 6]], index)) == expected[index % 6]
        engine.release([sequence.name])
        assert engine.info().kv.blocks_free == engine.info().kv.blocks_total
    assert hits == (
        12 if moved_out else 0
    )  # in turn, six prompts evict each other from the pool before they are repeated
    engine.close()


def tiers_of(pool: KvPool) -> Tiers:
    assert pool.tiers is not None
    return pool.tiers


@pytest.mark.parametrize("cheaper", ["loading", "computing"])
def test_a_preempted_sequence_is_loaded_or_recomputed_whichever_is_cheaper(case: ModelCase, cheaper: str) -> None:
    prompt = some_tokens(22)
    expected = generate(case.engine(), prompt, 60)
    engine, pool = case.engine_and_pool(24 * case.layout().tables, host_bytes=1 << 20)
    sequence = sequence_on(engine, prompt)
    sequence.open()
    sequence.decode(25)
    engine.release([sequence.name])
    for seed in (3, 4):
        generate(engine, some_tokens(90, seed), 2)  # uses nearly every block
    if cheaper == "computing":
        tiers_of(pool).costs.record_load(Medium.HOST, 1 << 20, 1e9)
    assert sequence.open() == (44 if cheaper == "loading" else 0)
    assert (tiers_of(pool).host.loaded > 0) == (cheaper == "loading")
    sequence.decode(35)
    assert sequence.tokens[22:] == expected
    engine.close()


def test_the_cost_of_computing_is_measured_in_steps(full: ModelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, int]] = []
    engine, pool = full.engine_and_pool(300, host_bytes=1 << 20)
    costs = tiers_of(pool).costs
    monkeypatch.setattr(
        costs, "record_compute", lambda tokens, prompt_tokens, seconds: noted.append((tokens, prompt_tokens))
    )
    sequence = replace(sequence_on(engine, some_tokens(50)), chunk=40)
    sequence.open()
    for _ in range(3):
        sequence.step(lambda _: TokenTree.chain([5, 6]))
    assert noted == [(40, 40), (12, 10), (3, 0)]
    engine.close()


def test_blocks_that_are_about_to_be_loaded_are_not_evicted_from_the_host(full: ModelCase) -> None:
    block_bytes = BLOCK * 2 * 2 * 3 * 8 * 4
    engine, pool = full.engine_and_pool(12, host_bytes=24 * block_bytes)
    first, *others = [some_tokens(41, seed=seed) for seed in range(3)]
    for prompt in (first, *others):
        generate(engine, prompt, 1)  # each evicts the one before it from the pool
    sequence = sequence_on(engine, first)
    assert sequence.open() == 40  # without `touch`, the host would evict it first
    assert tiers_of(pool).host.dropped > 0
    engine.close()


def test_kv_that_cannot_be_loaded_is_computed(full: ModelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = some_tokens(41)
    engine, pool = full.engine_and_pool(26, host_bytes=1 << 20)
    expected = generate(engine, prompt, 12)
    generate(engine, some_tokens(95, seed=1), 9)  # uses every block
    monkeypatch.setattr(tiers_of(pool), "load", lambda key, parts: False)
    sequence = sequence_on(engine, prompt)
    assert sequence.open() == 0
    assert sequence.decode(12) == expected
    engine.release([sequence.name])
    assert pool.blocks_free == 26
    engine.close()


def test_a_prefix_is_searched_again_when_loading_fails_after_an_eviction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter cached prefix of a windowed model shares no block with a longer one, so it may have been evicted."""
    engine, pool = save_case(tmp_path, tiny.mistral(sliding_window=WINDOW)).engine_and_pool(9, host_bytes=1 << 20)
    monkeypatch.setattr(tiers_of(pool), "load", lambda key, parts: False)
    texts = [some_tokens(80, seed) for seed in range(2)]
    draw = random.Random(4)
    for index in range(30):
        text = draw.choice(texts)
        sequence = replace(sequence_on(engine, text[: draw.randrange(5, 80)], f"s{index}"), chunk=8)
        sequence.open()
        while sequence.stored < len(sequence.tokens) - 1:
            sequence.step()
        engine.release([sequence.name])
        assert pool.blocks_free == 9
    engine.close()


def test_an_engine_that_fails_during_warm_up_leaves_no_files(
    full: ModelCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: TargetEngine, profile: object) -> None:
        assert list(tmp_path.iterdir())
        raise ZeroDivisionError

    monkeypatch.setattr(TargetEngine, "warm_up", fail)
    kv = KvSection(pool_bytes=1 << 20, disk_directory=str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        build_engine(TargetSection(path=str(full.directory), device="cpu", kv=kv))
    assert not list(tmp_path.iterdir())


def test_searching_all_tiers_for_a_prompt_hashes_it_once(full: ModelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    engine = full.engine(26, host_bytes=1 << 20)
    prompt = some_tokens(41)
    generate(engine, prompt, 1)
    generate(engine, some_tokens(95, seed=1), 9)  # uses every block
    key_of = block_table.next_key
    monkeypatch.setattr(block_table, "next_key", lambda before, tokens: (hashed.append(1), key_of(before, tokens))[1])
    assert sequence_on(engine, prompt).open() == 40
    assert len(hashed) == 10
    engine.close()


@pytest.mark.parametrize("lost", [0.0, 0.2], ids=["all blocks load", "some loads fail"])
def test_random_sequences_get_their_own_text_and_leak_no_block(
    case: ModelCase, lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = case.layout()
    engine, pool = case.engine_and_pool(30 * layout.tables, host_bytes=1 << 18)
    chance, load = random.Random(6), tiers_of(pool).load
    monkeypatch.setattr(tiers_of(pool), "load", lambda key, parts: chance.random() >= lost and load(key, parts))
    plain = case.engine(prefix_cache=False)
    draw = random.Random(5)
    texts = [[*some_tokens(draw.randrange(1, 40), seed=seed)] for seed in range(4)]
    texts = [[*text, *generate(plain, text, 40)] for text in texts]
    held: dict[str, EngineSequence] = {}
    for index in range(150):
        action = draw.random()
        if action < 0.35 and len(held) < 6:
            text = draw.choice(texts)
            parent = draw.choice([None, *held])
            sequence = sequence_on(engine, text[: draw.randrange(max(1, len(text) - 40), len(text))], f"s{index}")
            sequence.open(parent)
            held[f"s{index}"] = sequence
        elif held and action < 0.85:
            name = draw.choice(sorted(held))
            sequence = held[name]
            text = next(text for text in texts if text[: len(sequence.tokens)] == sequence.tokens)
            if not advance(sequence, drafts_near(text, index)) or len(sequence.tokens) > len(text):
                engine.release([sequence.name])
                del held[name]
            elif sequence.tokens != text[: len(sequence.tokens)]:
                pytest.fail(f"index {index}: another text")
        elif held:
            engine.release([held.pop(draw.choice(sorted(held))).name])
    kv = engine.release_all()
    assert kv.blocks_free == kv.blocks_total
    engine.close()


def advance(sequence: EngineSequence, propose: Propose) -> bool:
    """Run one step. Returns `False` if there was no memory for it."""
    tokens, stored = sequence.tokens, sequence.stored
    row = VerifyRow(sequence.name, len(tokens), tuple(tokens[stored:]), propose(tokens))
    verdict = sequence.engine.step(StepBatch((row,))).verdicts[0]
    if verdict.fault is not None:
        assert verdict.fault.code is RowFaultCode.KV_EXHAUSTED
        return False
    sequence.stored = len(tokens) + verdict.accepted
    tokens.extend(verdict.tokens)
    return True
