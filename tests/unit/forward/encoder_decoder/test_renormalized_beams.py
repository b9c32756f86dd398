"""Beams of a model whose generation configuration renormalizes logits are scored among the tokens that are allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.request import BeamParameters, EarlyStopping
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


@pytest.mark.slow
@pytest.mark.parametrize("words", ["single tokens", "pairs"])
@pytest.mark.parametrize("repeats", [0, 2])
async def test_beams_are_those_of_transformers(model: SourcedModel, tmp_path: Path, repeats: int, words: str) -> None:
    plain = model.reference()
    options = {"num_beams": 4, "num_return_sequences": 4, "do_sample": False}
    stops = frequent([by_transformers(plain, model.engine().info(), SOURCE, do_sample=False, eos_token_id=[2])[0]])
    written = by_transformers(plain, model.engine().info(), SOURCE, eos_token_id=stops, **options)
    probable = dict.fromkeys((*written[0], *range(10, 60, 3)))
    bad = [[token] for token in probable if token not in stops]
    if words == "pairs":
        bad = [[first, last] for first in probable for [last] in bad if first not in stops][:1000]
    values = {"bad_words_ids": bad, "no_repeat_ngram_size": repeats}
    one = model.with_generation_config(tmp_path / "one", renormalize_logits=True, **values)
    other = model.with_generation_config(tmp_path / "other", renormalize_logits=False, **values)
    different = 0
    for kind in (one, other):
        reference, engine = kind.reference(), kind.engine()
        info = engine.info()
        async with serving(EngineTarget(engine)) as coordinator:
            for source in SOURCES:
                beam = BeamParameters(4, 1.0, EarlyStopping.NO)
                wanted = request(info, source, stops=frozenset(stops), n=4, beam=beam)
                wanted = replace(wanted, sampling=replace(wanted.sampling, no_repeat_ngram_size=repeats))
                answers = by_transformers(reference, info, source, eos_token_id=stops, **options)
                assert await answers_of(coordinator, wanted) == answers
                if kind is other:
                    own = by_transformers(one.reference(), info, source, eos_token_id=stops, **options)
                    different += own != answers
    assert different, "renormalizing changed no beam"
