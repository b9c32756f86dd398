"""The benchmarks' and the soak's own arithmetic: figures, floors and verdicts, without measuring anything."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from cluster.core.config import TargetSection
from cluster.core.errors import NotReady
from cluster.wire.clients import GenerationClient
from pilotfish.v1 import generation_pb2
from tests import tiny
from tests.bench import options, prefix
from tests.bench.__main__ import SECTIONS
from tests.bench.asking import Answer
from tests.bench.decoding import Decoding
from tests.bench.machine import weight_bytes
from tests.bench.report import percentile, ratios, spread
from tests.soak.asks import KINDS, MOST_TOKENS, Ask, Catalogue
from tests.soak.reference import Reference
from tests.soak.traffic import Findings, Traffic
from tests.soak.watch import Resident
from workers.target.ranks import build_engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("bench"), tiny.llama())


def section(directory: Path, **changes: object) -> TargetSection:
    return TargetSection.model_validate(
        {"path": str(directory), "device": "cpu", "kv": {"pool_bytes": 1 << 20}, "compile": "off"} | changes
    )


def test_a_figure_carries_its_spread() -> None:
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0–3.0)"
    assert spread([2.346]) == "2.35"


def test_a_ratio_is_of_neighbours() -> None:
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [1.0, 2.0])


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.01) == 7.0


def test_growth_is_the_exponent() -> None:
    assert prefix.growth({m: [3.0 * m**2] for m in (8, 16, 32, 64)}) == pytest.approx(2.0)


def test_gaps_lie_between_tokens() -> None:
    answer = Answer(1.0, [5, 6, 7], [1.5, 1.75, 2.5])
    assert answer.first_token_seconds == 0.5
    assert answer.gaps == [0.25, 0.75]


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


def test_sections_are_chosen_by_name() -> None:
    assert options.parse(SECTIONS, [])[0] == list(SECTIONS)
    names, asked = options.parse(SECTIONS, ["step", "--quick", "--set", "draft.method=none"])
    assert (names, asked.repeats, asked.assignments) == (["step"], 1, ("draft.method=none",))
    with pytest.raises(SystemExit):
        options.parse(SECTIONS, ["sleep"])


def test_a_stepped_engine_says_what_the_model_says(directory: Path) -> None:
    """However many guesses ride along, and in however many chunks the prompt came."""
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


def test_a_catalogue_holds_every_kind_and_is_its_seeds() -> None:
    phrases = [range(3, 12), range(20, 27)]
    first, again, other = (Catalogue(phrases, KINDS, 48, seed).asks for seed in (1, 1, 2))
    assert first == again != other
    assert Counter(asked.kind for asked in first) == {kind: 3 * share for kind, share in KINDS.items()}
    for asked in first:
        assert asked.prompt
        assert len(asked.prompt) + asked.max_tokens <= MOST_TOKENS
        assert asked.message("name").token_ids.ids == list(asked.prompt)
    assert {asked.kind for asked in Catalogue(phrases, ("short",), 9, 0).asks} == {"short"}


def test_rounding_excuses_nothing_larger_than_its_bound(directory: Path) -> None:
    """Swapping two tokens of close scores is excused; another token is not, and more tokens are not."""
    asked = Ask("short", tuple(range(5, 15)), 6, temperature=1.0, seed=3)
    strict, lenient = Reference(directory, 1e-3), Reference(directory, 200.0)
    (own,) = strict.answers(asked)
    swapped = (*own[:2], (own[2] + 1) % tiny.VOCABULARY, *own[3:])
    assert not strict.is_near(asked, 0, swapped)
    assert lenient.is_near(asked, 0, swapped)
    assert not lenient.is_near(asked, 0, (*own, 5))


def test_several_answers_are_single_ones_with_seeds_of_their_own(directory: Path) -> None:
    asked = Ask("several", tuple(range(5, 15)), 6, temperature=1.0, seed=3, n=3)
    reference = Reference(directory, 1e-3)
    singles = [reference.answers(replace(asked, n=1, seed=3 + index))[0] for index in range(3)]
    assert list(reference.answers(asked)) == singles
    assert len(set(singles)) > 1


def test_beams_are_compared_by_their_scores(directory: Path) -> None:
    asked = Ask("beams", tuple(range(5, 15)), 6, n=2, width=3)
    reference = Reference(directory, 1e-3)
    best, second = reference.answers(asked)
    assert reference.is_near(asked, 0, best)
    assert not reference.is_near(asked, 0, second)


class Scripted:
    """A client whose server answers what it is told to, a token at a time."""

    def __init__(self, answers: Sequence[Sequence[int]], error: Exception | None = None) -> None:
        self._answers = answers
        self._error = error

    async def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for index, answer in enumerate(self._answers):
            for token in answer:
                await asyncio.sleep(0)
                delta = generation_pb2.GenerationDelta(token_ids=[token])
                yield generation_pb2.GenerateResponse(index=index, delta=delta)
        if self._error is not None:
            raise self._error

    async def abort(self, request_id: str) -> bool:
        return True


async def findings_of(client: Scripted, asked: Ask, reference: Reference, seconds: float = 0.05) -> Findings:
    traffic = Traffic(cast(GenerationClient, client), (asked,), reference, at_once=2, seed=0)
    await traffic.run(seconds, pauses=0.0)
    return traffic.findings


async def test_traffic_tells_right_answers_from_wrong_ones(directory: Path) -> None:
    reference = Reference(directory, 1e-3)
    asked = Ask("several", tuple(range(5, 15)), 6, temperature=1.0, seed=3, n=2)
    first, second = reference.answers(asked)
    right = await findings_of(Scripted((first, second)), asked, reference)
    assert right.is_clean
    assert right.ended["several"] > 0
    for answers in ((second, first), (first, second[:-1]), (first, (*second, 5))):
        wrong = await findings_of(Scripted(answers), asked, reference)
        assert wrong.wrong > 0
        assert not wrong.is_clean
        assert wrong.complaints


async def test_a_failed_request_is_a_finding(directory: Path) -> None:
    reference = Reference(directory, 1e-3)
    asked = Ask("short", tuple(range(5, 15)), 6)
    failed = await findings_of(Scripted((), NotReady("away")), asked, reference)
    assert failed.failed > 0
    assert not failed.is_clean


def test_memory_is_judged_by_its_last_two_thirds() -> None:
    warming = Resident([float(second) for second in range(90)], [min(500.0, 400 + 10.0 * s) for s in range(90)])
    assert warming.growth() == pytest.approx(0.0, abs=1e-6)
    leaking = Resident([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [100.0, 101.0, 102.0, 103.0, 104.0, 105.0])
    assert leaking.growth() == pytest.approx(3600.0)
