"""The arithmetic of the benchmarks, and the engine that they step. Measures nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.config.target_section import TargetSection
from tests.bench import options
from tests.bench.client import Answer, Answers
from tests.bench.decoding import Decoding
from tests.bench.machine import weight_bytes
from tests.bench.report import percentile
from tests.bench.sections import prefix
from tests.bench.sections.remote import crossing
from tests.support.models import tiny
from workers.verify.build import build_engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("bench"), tiny.llama())


def section(directory: Path, **changes: object) -> TargetSection:
    return TargetSection.model_validate(
        {"path": str(directory), "device": "cpu", "kv": {"pool_bytes": 1 << 20}, "compile": "off"} | changes
    )


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.01) == 7.0


def test_growth_is_the_exponent_of_the_cost() -> None:
    assert prefix.growth({m: [3.0 * m**2] for m in (8, 16, 32, 64)}) == pytest.approx(2.0)


def test_times_cross_a_bound_between_two_delays_beyond_them_at_once_or_never() -> None:
    delays, seconds = (0.0, 1.0, 3.0), [2.0, 4.0, 8.0]
    assert [crossing(delays, seconds, bound) for bound in (3.0, 6.0, 10.0)] == [0.5, 2.0, 4.0]
    assert crossing(delays, seconds, 2.0) is None
    assert crossing(delays, [2.0, 2.0, 2.0], 3.0) == float("inf")


def test_a_step_reads_each_weight_once(directory: Path, tmp_path: Path) -> None:
    whole = weight_bytes(section(directory))
    embeddings = 4 * tiny.VOCABULARY * 48
    assert weight_bytes(section(directory), read_by_a_step=True) == whole - embeddings
    assert weight_bytes(section(directory, dtype="bfloat16")) == whole // 2
    tied = tiny.save(tmp_path, tiny.llama(tie_word_embeddings=True))
    assert weight_bytes(section(tied), read_by_a_step=True) == weight_bytes(section(tied)) == whole - embeddings


def test_int8_weights_take_a_byte_each(directory: Path) -> None:
    linear = weight_bytes(section(directory), read_by_a_step=True) // 4 - 48 * (2 * 2 + 1)  # without the norms
    assert weight_bytes(section(directory, quantization="int8"), read_by_a_step=True) == linear + 4 * 48 * (2 * 2 + 1)


def test_prompts_of_any_number_are_distinct() -> None:
    assert len(set(options.own_prompts(60))) == 60


def test_the_decoding_rate_counts_from_the_first_tokens() -> None:
    first = Answer(0.0, [1, 2, 3, 4], [1.0, 1.0, 2.0, 3.0], steps=3, first_tokens=2)
    second = Answer(1.0, [1, 2], [2.0, 4.0], steps=1, first_tokens=1)
    answers = Answers([first, second], seconds=4.0)
    assert (answers.rate, answers.committed_per_step) == (1.5, 1.5)
    assert answers.decoding_rate == 3 / (2 + 2)


def test_an_engine_that_is_stepped_directly_always_writes_the_same_text(directory: Path) -> None:
    """The text is the same for any number of drafted tokens and any size of prompt chunks."""
    texts = []
    for chunk, queries in ((64, 1), (3, 1), (64, 8)):
        engine = build_engine(section(directory))
        decoding = Decoding(engine, chunk)
        assert decoding.add("a", range(3, 20)) > 0
        while len(decoding.text("a")) < 30:
            decoding.step(queries)
        texts.append(decoding.text("a")[:30])
        decoding.clear()
        assert engine.info().kv.blocks_free == engine.info().kv.blocks_total
    assert texts == [texts[0]] * 3
