"""A model whose generation configuration forbids repeated n-grams writes none, with drafts and by beams."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from cluster.core.errors import ModelLoadError
from cluster.core.request import BeamParameters, EarlyStopping, SamplingParameters
from tests.support.engines.engine_port import EngineTarget
from tests.support.engines.engine_sequence import GREEDY, drafts_near
from tests.support.engines.sourced import SOURCE, SourcedModel, greedy_answer, translate
from tests.support.fakes.fake_cluster import answers_of
from tests.unit.forward.encoder_decoder.test_sourced_requests import (
    SOURCES,
    by_transformers,
    frequent,
    request,
    serving,
)
from workers.model.encoder_decoder.generation_defaults import read_generation_defaults

SIZE, COUNT = 2, 24


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_excluded_tokens_are_those_of_transformers(size: int) -> None:
    draw, processor = random.Random(size), NoRepeatNGramLogitsProcessor(size)
    sampling, excluded = SamplingParameters(no_repeat_ngram_size=size), 0
    for length in range(1, 40):
        tokens = tuple(draw.randrange(4) for _ in range(length))
        scores = processor(torch.tensor([tokens]), torch.zeros((1, 4)))
        wanted = set(torch.isinf(scores[0]).nonzero().flatten().tolist())
        assert sampling.repeated_ngram_ends(tokens) == wanted
        excluded += len(wanted)
    assert excluded
    assert SamplingParameters().repeated_ngram_ends((1, 1, 1)) == frozenset()


def test_drafts_change_nothing_and_the_text_is_that_of_transformers(model: SourcedModel, tmp_path: Path) -> None:
    strict = model.with_generation_config(tmp_path / "strict", no_repeat_ngram_size=SIZE)
    engine = strict.engine()
    assert engine.info().no_repeat_ngram_size == SIZE
    sampling = replace(GREEDY, no_repeat_ngram_size=SIZE)
    free, plain = translate(engine, COUNT), translate(engine, COUNT, sampling=sampling)
    assert plain != free
    assert plain == greedy_answer(strict.reference(), SOURCE, COUNT)
    start = list(engine.info().decoder_start)
    for right in (plain, free):  # nodes on paths with and without a repeated n-gram
        assert translate(engine, COUNT, sampling=sampling, propose=drafts_near([*start, *right])) == plain


@pytest.mark.parametrize("width", [1, 4])
async def test_answers_and_beams_are_those_of_transformers(model: SourcedModel, tmp_path: Path, width: int) -> None:
    strict = model.with_generation_config(tmp_path / "strict", no_repeat_ngram_size=SIZE)
    engine = strict.engine()
    reference, info = strict.reference(), engine.info()
    stops = frequent([by_transformers(reference, info, SOURCE, do_sample=False, eos_token_id=[2])[0]])
    options = {"num_beams": width, "do_sample": False, "eos_token_id": stops}
    beam = None if width == 1 else BeamParameters(width, 1.0, EarlyStopping.NO)
    async with serving(EngineTarget(engine)) as coordinator:
        for source in SOURCES:
            wanted = request(info, source, stops=frozenset(stops), beam=beam)
            wanted = replace(wanted, sampling=replace(wanted.sampling, no_repeat_ngram_size=SIZE))
            assert await answers_of(coordinator, wanted) == by_transformers(reference, info, source, **options)


@pytest.mark.parametrize("size", [-1, 5000, "2"])
def test_a_wrong_size_is_refused_when_the_model_is_loaded(marian: SourcedModel, tmp_path: Path, size: object) -> None:
    wrong = marian.with_generation_config(tmp_path / "wrong", no_repeat_ngram_size=size)
    with pytest.raises(ModelLoadError, match=r"no_repeat_ngram_size: .* is refused; it must be an integer from 0"):
        read_generation_defaults(wrong.directory)
