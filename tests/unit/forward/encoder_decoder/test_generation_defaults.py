"""What a generation configuration says of lengths and beams holds for requests that say nothing of them."""

from __future__ import annotations

import json
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


def test_config_json_counts_only_without_a_generation_configuration(marian: SourcedModel, tmp_path: Path) -> None:
    """`transformers` reads one of the two files alone, too."""
    own = {"decoder_start_token_id": 7, "no_repeat_ngram_size": 3}
    both = marian.with_generation_config(tmp_path / "both", **own)
    config = json.loads((both.directory / "config.json").read_text())
    stated = {"decoder_start_token_id": 5, "forced_bos_token_id": 9, "length_penalty": 2.0, "no_repeat_ngram_size": 4}
    (both.directory / "config.json").write_text(json.dumps(config | stated))

    found, reference = read_generation_defaults(both.directory), both.reference().generation_config

    assert (found.decoder_start, found.no_repeat_ngram_size, found.beam_scoring) == ((7,), 3, BeamScoring())
    assert (reference.forced_bos_token_id, reference.no_repeat_ngram_size) == (None, 3)

    file = both.directory / "generation_config.json"
    file.write_text(json.dumps({"no_repeat_ngram_size": 3}))
    assert read_generation_defaults(both.directory).decoder_start == (5,)  # where `transformers` would not begin

    file.unlink()
    found, reference = read_generation_defaults(both.directory), both.reference().generation_config
    assert (found.decoder_start, found.no_repeat_ngram_size, found.beam_scoring.length_penalty) == ((5, 9), 4, 2.0)
    assert (reference.decoder_start_token_id, reference.forced_bos_token_id) == (5, 9)


@pytest.mark.parametrize("ends", [2, [2, 6]])
def test_bad_words_keep_no_answer_from_ending_but_suppressed_tokens_do(
    marian: SourcedModel, tmp_path: Path, ends: int | list[int]
) -> None:
    """`transformers` generates so, too: an end token that is also a bad word ends an answer."""
    values = {"eos_token_id": ends, "bad_words_ids": [[2], [0], [2, 5]], "suppress_tokens": [2, 8]}
    found = read_generation_defaults(marian.with_generation_config(tmp_path / "m", **values).directory)
    assert found.bad_words == ((0,), (2, 5), (2,), (8,))


def test_what_answers_do_not_follow_is_reported(
    marian: SourcedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = {"repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "sequence_bias": None}
    read_generation_defaults(marian.with_generation_config(tmp_path / "usual", **usual).directory)
    assert not caplog.records
    other = {"repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 3}
    read_generation_defaults(marian.with_generation_config(tmp_path / "other", **other).directory)
    assert caplog.messages == [
        "other: answers do not follow encoder_no_repeat_ngram_size, repetition_penalty of its generation configuration"
    ]


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
