"""Requests with a source, from the coordinator to the engine: the answers of `transformers`, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import RequestId, SequenceId
from cluster.core.request import BeamParameters, EarlyStopping, GenerationRequest, SamplingParameters, StoppingCriteria
from cluster.core.tree import ROOT, TokenTree
from cluster.core.verification import TargetInfo
from tests.support.engines.engine_port import EngineTarget, MethodDrafter
from tests.support.engines.engine_sequence import some_tokens
from tests.support.engines.sourced import SOURCE, SourcedModel
from tests.support.fakes.fake_cluster import answers_of, configure, until
from workers.draft.ngram import NgramDrafter, NgramSettings

SOURCES = (SOURCE, tuple(some_tokens(19, 5)), tuple(some_tokens(6, 6)))
LENGTH = 14


@asynccontextmanager
async def serving(target: EngineTarget, **overrides: object) -> AsyncIterator[Coordinator]:
    """A coordinator over the engine, with drafts from the text and the source."""
    drafter = MethodDrafter(NgramDrafter(NgramSettings(min=1), DraftSection(max_nodes=6, max_depth=4)))
    async with asyncio.timeout(60.0):
        coordinator = Coordinator(target, [drafter], configure(**overrides), Metrics())
        async with coordinator:
            yield coordinator


def request(
    info: TargetInfo,
    source: Sequence[int],
    name: str = "r",
    stops: frozenset[int] = frozenset(),
    n: int = 1,
    beam: BeamParameters | None = None,
    seed: int | None = None,
) -> GenerationRequest:
    """A request as the ingress makes it."""
    sampling = SamplingParameters(temperature=0.0 if seed is None else 0.9, seed=seed or 0, bad_words=info.bad_words)
    stopping = StoppingCriteria(LENGTH, stops, forced_eos_token_id=info.forced_eos_token_id)
    return GenerationRequest(
        RequestId(name), info.decoder_start, sampling, stopping, n=n, beam=beam, source=tuple(source)
    )


def by_transformers(reference: Any, info: TargetInfo, source: Sequence[int], **options: Any) -> list[list[int]]:
    """The answers of `generate` after the decoder's start, cut after their first stop token."""
    forced = len(info.decoder_start) - 1
    output = reference.generate(torch.tensor([list(source)]), max_new_tokens=LENGTH + forced, **options)
    return [until_stop(row[len(info.decoder_start) :], options["eos_token_id"]) for row in output.tolist()]


def until_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
    ends = [index for index, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


def frequent(answers: Sequence[Sequence[int]]) -> list[int]:
    """The end-of-sequence token, and a token that greedy answers reach soon."""
    return sorted({2, answers[0][len(answers[0]) // 2]})


async def test_greedy_answers_end_as_those_of_transformers(model: SourcedModel) -> None:
    reference, target = model.reference(), EngineTarget(model.engine())
    info = target.engine.info()
    free = [by_transformers(reference, info, source, do_sample=False, eos_token_id=[2])[0] for source in SOURCES]
    stops = frequent(free)
    expected = [by_transformers(reference, info, source, do_sample=False, eos_token_id=stops)[0] for source in SOURCES]
    async with serving(target) as coordinator:
        for ends, wanted in ((frozenset({2}), free), (frozenset(stops), expected)):
            requests = [request(info, source, f"r{index}", ends) for index, source in enumerate(SOURCES)]
            found = await asyncio.gather(*(answers_of(coordinator, one) for one in requests))
            assert [answers[0] for answers in found] == wanted
    assert target.drafted > 0
    assert any(len(answer) < LENGTH for answer in expected)


@pytest.mark.parametrize("early", [EarlyStopping.YES, EarlyStopping.NO])
async def test_beams_are_those_of_transformers(model: SourcedModel, early: EarlyStopping) -> None:
    reference, target = model.reference(), EngineTarget(model.engine())
    info = target.engine.info()
    stops = frequent([by_transformers(reference, info, SOURCE, do_sample=False, eos_token_id=[2])[0]])
    beams: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "do_sample": False, "eos_token_id": stops}
    beams |= {"length_penalty": 0.7, "early_stopping": early is EarlyStopping.YES}
    async with serving(target) as coordinator:
        for source in SOURCES:
            wanted = request(info, source, "b", frozenset(stops), n=4, beam=BeamParameters(4, 0.7, early))
            assert await answers_of(coordinator, wanted) == by_transformers(reference, info, source, **beams)
        await until(lambda: target.is_empty)


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [(), (2, 5, 9, 10, 17)], ids=["quiet", "crashes"])
async def test_samples_and_beams_in_too_little_memory_are_as_alone(
    model: SourcedModel, crashes: tuple[int, ...]
) -> None:
    alone, crowded = EngineTarget(model.engine()), EngineTarget(model.engine(blocks=22), crashes)
    info = alone.engine.info()
    requests = [request(info, source, f"s{index}", n=3, seed=index) for index, source in enumerate(SOURCES)]
    requests += [request(info, SOURCE, "beams", n=2, beam=BeamParameters(3))]
    async with serving(alone) as coordinator:
        expected = [await answers_of(coordinator, one) for one in requests]
    async with serving(crowded, scheduler__max_sequences=6) as coordinator:
        assert await asyncio.gather(*(answers_of(coordinator, one) for one in requests)) == expected
        await until(lambda: crowded.is_empty)
    assert crowded.fewest_free < 4
    assert len({tuple(answer) for answer in expected[0]}) == 3


async def test_samples_and_beams_share_their_source(marian: SourcedModel) -> None:
    source = tuple(some_tokens(200, 9))
    target = EngineTarget(marian.engine(blocks=200))
    info = target.engine.info()
    async with serving(target) as coordinator:
        await answers_of(coordinator, request(info, source, n=4, seed=1))
        await answers_of(coordinator, request(info, source, n=4, beam=BeamParameters(4)))
    assert 200 - target.fewest_free < 50 + 4 * 6  # blocks of the source, and of four answers


class SiblingsDrafter:
    """Drafts as many tokens below the last committed one as the budget allows."""

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        counts = [row.budget.max_nodes for row in rows]
        trees = [TokenTree(tuple(range(3, 3 + count)), (ROOT,) * count) for count in counts]
        return tuple(Proposal(row.sequence_id, row.base_len, tree) for row, tree in zip(rows, trees, strict=True))

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        pass


async def test_drafts_leave_room_for_the_source_of_a_request_that_fits_alone(marian: SourcedModel) -> None:
    target = EngineTarget(marian.engine(blocks=7))  # of four tokens: 5 of the source, and 2 of the answer
    info, metrics = target.engine.info(), Metrics()
    wanted = request(info, some_tokens(17, 5))
    wanted = replace(wanted, stopping=replace(wanted.stopping, max_tokens=8 - len(info.decoder_start)))
    drafter, configuration = MethodDrafter(SiblingsDrafter()), configure(draft__max_nodes=8)
    async with asyncio.timeout(20.0), Coordinator(target, [drafter], configuration, metrics) as coordinator:
        (answer,) = await answers_of(coordinator, wanted)
    assert len(answer) == wanted.stopping.max_tokens
    assert target.drafted > 0
