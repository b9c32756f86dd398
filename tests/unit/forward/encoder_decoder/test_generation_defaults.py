"""What a generation configuration says of lengths and beams holds for requests that say nothing of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.errors import ModelLoadError
from cluster.core.request import BeamParameters, BeamScoring, EarlyStopping
from tests.support.engines.engine_port import EngineTarget
from tests.support.engines.sourced import SOURCE, SourcedModel
from tests.support.fakes.fake_cluster import answers_of
from tests.unit.forward.encoder_decoder.test_sourced_requests import (
    SOURCES,
    by_transformers,
    frequent,
    request,
    serving,
)
from workers.model.encoder_decoder.generation_defaults import read_generation_defaults

MIN_LENGTH = 11


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 4])
async def test_answers_are_as_long_as_those_of_transformers(model: SourcedModel, tmp_path: Path, width: int) -> None:
    values = {"min_length": MIN_LENGTH, "length_penalty": -1.0, "early_stopping": True}
    strict = model.with_generation_config(tmp_path / "strict", **values)
    engine, reference = strict.engine(), strict.reference()
    info = engine.info()
    assert info.min_tokens == MIN_LENGTH - len(info.decoder_start)
    assert info.beam_scoring == BeamScoring(-1.0, EarlyStopping.YES)
    stops = frequent([by_transformers(reference, info, SOURCE, do_sample=False, eos_token_id=[2])[0]])
    options = {"num_beams": width, "do_sample": False, "eos_token_id": stops}
    beam = None if width == 1 else BeamParameters(width, -1.0, EarlyStopping.YES)
    differs = 0
    async with serving(EngineTarget(engine)) as coordinator:
        for source in SOURCES:
            free = request(info, source, stops=frozenset(stops), beam=beam)
            sampling = replace(free.sampling, min_tokens=info.min_tokens, end_token_ids=tuple(stops))
            answers = await answers_of(coordinator, replace(free, sampling=sampling))
            assert answers == by_transformers(reference, info, source, **options)
            differs += answers != await answers_of(coordinator, free)
    assert differs, "no answer would have been shorter"


@pytest.mark.parametrize(
    ("values", "fewest"),
    [
        ({"min_length": 9}, 8),
        ({"min_new_tokens": 5}, 5),
        ({"min_length": 9, "min_new_tokens": 5}, 5),
        ({"min_length": 9, "forced_bos_token_id": 4}, 7),
        ({}, 0),
    ],
)
def test_fewest_tokens_are_counted_after_the_start(
    marian: SourcedModel, tmp_path: Path, values: dict[str, object], fewest: int
) -> None:
    found = read_generation_defaults(marian.with_generation_config(tmp_path / "m", **values).directory)
    assert found.min_tokens == fewest


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("min_length", -1, "an integer from 0"),
        ("length_penalty", 11, "a number from -10 to 10"),
        ("early_stopping", "soon", "true, false or never"),
    ],
)
def test_a_wrong_value_is_refused_when_the_model_is_loaded(
    marian: SourcedModel, tmp_path: Path, name: str, value: object, bound: str
) -> None:
    wrong = marian.with_generation_config(tmp_path / "wrong", **{name: value})
    with pytest.raises(ModelLoadError, match=f"{name}: {value!r} is refused; it must be {bound}"):
        read_generation_defaults(wrong.directory)
