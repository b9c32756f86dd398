"""The soak test's requests, its reference, and its check of answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from cluster.core.errors import NotReady
from cluster.wire.generation_client import GenerationClient
from pilotfish.v1 import generation_pb2
from tests.soak.reference import Reference
from tests.soak.requests import KINDS, MAX_TOKENS, RequestCatalogue, SoakRequest
from tests.soak.traffic import Findings, Traffic
from tests.soak.watch import Resident
from tests.support.models import tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("bench"), tiny.llama())


def test_a_catalogue_holds_every_kind_and_depends_on_its_seed_alone() -> None:
    phrases = [range(3, 12), range(20, 27)]
    first, again, other = (
        RequestCatalogue(phrases, KINDS, 3 * sum(KINDS.values()), seed).requests for seed in (1, 1, 2)
    )
    assert first == again != other
    assert Counter(asked.kind for asked in first) == {kind: 3 * share for kind, share in KINDS.items()}
    for asked in first:
        assert asked.prompt
        assert len(asked.prompt) + asked.max_tokens <= MAX_TOKENS
        assert asked.message("name").token_ids.ids == list(asked.prompt)
    assert {asked.kind for asked in RequestCatalogue(phrases, ("short",), 9, 0).requests} == {"short"}


def test_differences_beyond_the_rounding_bound_are_errors(directory: Path) -> None:
    """Two swapped tokens with close scores are accepted; a different token or more tokens are not."""
    asked = SoakRequest("short", tuple(range(5, 15)), 6, temperature=1.0, seed=3)
    strict, lenient = Reference(directory, 1e-3), Reference(directory, 200.0)
    (own,) = strict.answers(asked)
    swapped = (*own[:2], (own[2] + 1) % tiny.VOCABULARY, *own[3:])
    assert not strict.is_near(asked, 0, swapped)
    assert lenient.is_near(asked, 0, swapped)
    assert not lenient.is_near(asked, 0, (*own, 5))


def test_several_answers_equal_single_ones_with_their_seeds(directory: Path) -> None:
    asked = SoakRequest("several", tuple(range(5, 15)), 6, temperature=1.0, seed=3, n=3)
    reference = Reference(directory, 1e-3)
    singles = [reference.answers(replace(asked, n=1, seed=3 + index))[0] for index in range(3)]
    assert list(reference.answers(asked)) == singles
    assert len(set(singles)) > 1


def test_beams_are_compared_by_their_scores(directory: Path) -> None:
    asked = SoakRequest("beams", tuple(range(5, 15)), 6, n=2, width=3)
    reference = Reference(directory, 1e-3)
    best, second = reference.answers(asked)
    assert reference.is_near(asked, 0, best)
    assert not reference.is_near(asked, 0, second)


class Scripted:
    """A client whose server streams scripted answers, one token at a time."""

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


async def findings_of(client: Scripted, asked: SoakRequest, reference: Reference, seconds: float = 0.05) -> Findings:
    traffic = Traffic(cast(GenerationClient, client), (asked,), reference, at_once=2, seed=0)
    await traffic.run(seconds, pauses=0.0)
    return traffic.findings


async def test_traffic_finds_wrong_answers(directory: Path) -> None:
    reference = Reference(directory, 1e-3)
    asked = SoakRequest("several", tuple(range(5, 15)), 6, temperature=1.0, seed=3, n=2)
    first, second = reference.answers(asked)
    right = await findings_of(Scripted((first, second)), asked, reference)
    assert right.is_clean
    assert right.ended["several"] > 0
    for answers in ((second, first), (first, second[:-1]), (first, (*second, 5))):
        wrong = await findings_of(Scripted(answers), asked, reference)
        assert wrong.wrong > 0
        assert not wrong.is_clean
        assert wrong.errors


async def test_traffic_reports_failed_requests(directory: Path) -> None:
    reference = Reference(directory, 1e-3)
    asked = SoakRequest("short", tuple(range(5, 15)), 6)
    failed = await findings_of(Scripted((), NotReady("away")), asked, reference)
    assert failed.failed > 0
    assert not failed.is_clean


def test_memory_growth_is_measured_over_the_last_two_thirds() -> None:
    warming = Resident([float(second) for second in range(90)], [min(500.0, 400 + 10.0 * s) for s in range(90)])
    assert warming.growth() == pytest.approx(0.0, abs=1e-6)
    leaking = Resident([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [100.0, 101.0, 102.0, 103.0, 104.0, 105.0])
    assert leaking.growth() == pytest.approx(3600.0)
