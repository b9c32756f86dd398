"""The blocks of sources: shared, kept after their last use, evicted, loaded from the tiers, apart for each tenant."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.drafting import RowFaultCode
from cluster.core.verification import VerifyRow
from tests.support.engines.engine_rows import verify
from tests.support.engines.engine_sequence import EngineSequence, drafts_near, some_tokens
from tests.support.engines.sourced import SAMPLED, SOURCE, SourcedModel, sourced, translate
from tests.unit.verify.test_engine_tiers import advance
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore, StoredSource
from workers.kv.tiers import Tiers
from workers.verify.engine import TargetEngine


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sources that encoders have read since the test began. A trial of the kernels reads one at each start."""
    found: list[tuple[int, ...]] = []
    mark = SourceStore.mark_encoded

    def record(store: SourceStore, source: StoredSource, hidden: torch.Tensor | None = None) -> None:
        found.append(source.tokens)
        mark(store, source, hidden)

    monkeypatch.setattr(SourceStore, "mark_encoded", record)
    return found


def start_on(engine: TargetEngine, source: Sequence[int], name: str, **options: Any) -> None:
    sequence = sourced(engine, source, name, **options)
    sequence.open()
    sequence.decode(1)


def test_a_source_is_read_once_while_it_is_used_and_after(marian: SourcedModel, read: list[tuple[int, ...]]) -> None:
    engine = marian.engine()
    read.clear()
    plain = translate(engine, 10)
    for name in ("b", "c"):
        start_on(engine, SOURCE, name)
    assert engine.info().kv.blocks_total - engine.info().kv.blocks_free == 3 + 2  # 9 tokens, and one block of each
    engine.release_all()
    assert translate(engine, 10) == plain
    assert read == [SOURCE]


def test_tenants_share_no_source(marian: SourcedModel, read: list[tuple[int, ...]]) -> None:
    engine = marian.engine()
    read.clear()
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant")):
        start_on(engine, SOURCE, name, salt=salt)
    assert read == [SOURCE, SOURCE]


def test_answers_to_different_sources_share_nothing(marian: SourcedModel) -> None:
    engine = marian.engine()
    answer = translate(engine, 12)
    other = sourced(engine, (*SOURCE[:-1], 3), answer=answer)
    assert other.open() == 0


def test_an_evicted_source_is_read_again(model: SourcedModel, read: list[tuple[int, ...]]) -> None:
    engine = model.engine(blocks=12)
    plain = translate(engine, 4)
    translate(engine, 4, some_tokens(40, 1))
    assert translate(engine, 4) == plain
    assert read.count(SOURCE) == 2


def test_an_evicted_source_comes_back_from_the_host(model: SourcedModel, read: list[tuple[int, ...]]) -> None:
    engine = model.engine(blocks=12, host_bytes=1 << 20)
    plain = translate(engine, 4, sampling=SAMPLED)
    translate(engine, 4, some_tokens(40, 1))
    assert translate(engine, 4, sampling=SAMPLED) == plain
    assert read.count(SOURCE) == 1
    engine.close()


def tiers_of(pool: KvPool) -> Tiers:
    assert pool.tiers is not None
    return pool.tiers


def test_an_evicted_source_comes_back_from_the_disk(
    model: SourcedModel, read: list[tuple[int, ...]], tmp_path: Path
) -> None:
    engine, pool = model.engine_and_pool(12, disk_directory=str(tmp_path))
    plain = translate(engine, 4, sampling=SAMPLED)
    translate(engine, 4, some_tokens(40, 1))
    tiers_of(pool).flush()
    assert translate(engine, 4, sampling=SAMPLED) == plain
    assert read.count(SOURCE) == 1
    assert tiers_of(pool).disk.loaded > 0
    engine.close()


@pytest.mark.parametrize("loaded", [0, 1], ids=["no block loads", "one block loads"])
def test_a_source_that_cannot_be_loaded_is_read_again(
    model: SourcedModel, read: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, loaded: int
) -> None:
    engine, pool = model.engine_and_pool(12, host_bytes=1 << 20)
    plain = translate(engine, 4, sampling=SAMPLED)
    translate(engine, 4, some_tokens(40, 1))
    load, calls = tiers_of(pool).load, count()
    monkeypatch.setattr(tiers_of(pool), "load", lambda key, parts: next(calls) < loaded and load(key, parts))
    assert translate(engine, 4, sampling=SAMPLED) == plain
    assert next(calls) > loaded
    assert read.count(SOURCE) == 2
    assert pool.blocks_free == 12
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0.0, 0.3], ids=["all blocks load", "some loads fail"])
def test_random_sequences_over_all_tiers_get_their_own_text_and_leak_no_block(
    model: SourcedModel, lost: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, chance = random.Random(5), random.Random(6)
    sources = [tuple(some_tokens(draw.randrange(2, 30), seed)) for seed in range(4)]
    plain = model.engine(prefix_cache=False)
    answers = [translate(plain, 24, source, SAMPLED) for source in sources]
    engine, pool = model.engine_and_pool(24, host_bytes=1 << 15, disk_directory=str(tmp_path))
    tiers, load = tiers_of(pool), tiers_of(pool).load
    monkeypatch.setattr(tiers, "load", lambda key, parts: chance.random() >= lost and load(key, parts))
    held: dict[str, tuple[EngineSequence, int]] = {}
    for index in range(120):
        action = draw.random()
        if action < 0.35 and len(held) < 4:
            which, parent = draw.randrange(4), draw.choice([None, *sorted(held)])
            known = answers[which][: draw.randrange(12)]
            sequence = sourced(engine, sources[which], f"s{index}", SAMPLED, answer=known)
            sequence.open(parent)
            held[f"s{index}"] = sequence, which
        elif held:
            name = draw.choice(sorted(held))
            sequence, which = held[name]
            text = [*engine.info().decoder_start, *answers[which]]
            has_room = action < 0.85 and advance(sequence, drafts_near(text, index))
            assert sequence.tokens[: len(text)] == text[: len(sequence.tokens)]
            if not has_room or len(sequence.tokens) >= len(text):
                engine.release([sequence.name])
                del held[name]
        tiers.flush()
    kv = engine.release_all()
    assert kv.blocks_free == kv.blocks_total
    assert tiers.host.loaded > 0 and tiers.disk.loaded > 0
    engine.close()


def test_a_source_without_room_is_a_fault_and_is_served_when_there_is_room(marian: SourcedModel) -> None:
    engine = marian.engine(blocks=5)
    start_on(engine, SOURCE, "first")
    row = VerifyRow(
        *(sourced(engine, (4, 4, 4, 4, 4), "second").name, 1, tuple(engine.info().decoder_start)),
        start=sourced(engine, (4, 4, 4, 4, 4)).start,
    )
    verdict = verify(engine, row)
    assert verdict.fault is not None and verdict.fault.code is RowFaultCode.KV_EXHAUSTED
    assert engine.info().kv.blocks_free == 1
    engine.release([sourced(engine, name="first").name])
    assert verify(engine, row).fault is None
    engine.release_all()
    assert engine.info().kv.blocks_free == 5
