"""Grammars, acceptance rules and int8 weights with a target of every encoder-decoder family."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection, TargetSection
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import VerifyRow
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.engines.engine_rows import verify
from tests.support.engines.engine_sequence import GREEDY, drafts_near
from tests.support.engines.sourced import SAMPLED, SOURCE, SourcedModel, sourced, translate
from tests.support.models import tiny, tiny_tokenizer
from tests.support.slow import slow_but
from tests.unit.verify.test_grammars import GRAMMARS, check
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.sampling.acceptance import RULES
from workers.verify.build import build_engine
from workers.verify.decider import LocalDecider, decider_of_model
from workers.verify.engine import EngineOptions, TargetEngine

VOCABULARY, END, COUNT, MOST = 320, 2, 24, 100
KV = KvSection(block_size=4, pool_bytes=1 << 20)
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}


@pytest.fixture(scope="module", params=slow_but(("marian", "t5"), sorted(tiny.ENCODER_DECODER_FAMILIES)))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are bytes and a few words."""
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp(request.param))
    return tiny.save(directory, tiny.ENCODER_DECODER_FAMILIES[request.param](vocab_size=VOCABULARY))


def engine_of(directory: Path, **section: str) -> TargetEngine:
    values = {"path": str(directory), "device": "cpu", "compile": "off"} | section
    model = load_model(ModelSection.model_validate(values))
    pool = KvPool(model.kv_spec, KV, 300)
    return TargetEngine(model, pool, decider_of_model(model, LocalDecider()), EngineOptions(directory=directory))


def constrained(engine: TargetEngine, kind: str, sampling: SamplingParameters, right: Sequence[int] = ()) -> list[int]:
    """An answer that matches a grammar, up to its end; with `right`, its drafts are often right."""
    sequence, draw = sourced(engine, sampling=sampling), random.Random(3)
    parameters = replace(sequence.start.sampling, grammar=GRAMMARS[kind], end_token_ids=(END,))
    start = replace(sequence.start, sampling=parameters)
    tokens, first = list(sequence.tokens), len(sequence.tokens)
    row = VerifyRow(sequence.name, first, tuple(tokens), start=start)
    while len(tokens) < first + MOST:
        verdict = verify(engine, row)
        assert verdict.fault is None, verdict.fault
        tokens.extend(verdict.tokens)
        if tokens[-1] == END:
            break
        expected = list(right[len(tokens) - first :][: draw.randrange(6)])
        paths = [[*expected[:1], draw.randrange(VOCABULARY)], expected] if right else []
        tree = TokenTree.from_candidates(paths, max_nodes=10)
        row = VerifyRow(sequence.name, len(tokens), (tokens[-1],), tree)
    engine.release([sequence.name])
    return tokens[first:]


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
def test_an_answer_matches_its_grammar_and_no_draft_changes_it(directory: Path, sampling: str) -> None:
    engine, ended = engine_of(directory), 0
    for kind in sorted(GRAMMARS):
        plain = constrained(engine, kind, SAMPLINGS[sampling])
        if plain[-1] == END:
            check(GRAMMARS[kind], Tokenizer.load(directory).decode(plain[:-1]))
            ended += 1
        assert constrained(engine, kind, SAMPLINGS[sampling], plain)[:MOST] == plain[:MOST], kind
    assert ended > 0


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
def test_with_int8_weights_no_draft_changes_the_text(model: SourcedModel, sampling: str) -> None:
    engine = engine_of(model.directory, quantization="int8")
    plain = translate(engine, COUNT, sampling=SAMPLINGS[sampling])
    start = list(engine.info().decoder_start)
    assert translate(engine, COUNT, sampling=SAMPLINGS[sampling], propose=drafts_near([*start, *plain])) == plain
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


@pytest.mark.slow
@pytest.mark.parametrize("rule", [name for name in RULES.names() if name != "synthetic"])
def test_an_acceptance_rule_keeps_greedy_answers_unless_it_is_lossy(model: SourcedModel, rule: str) -> None:
    section = TargetSection(path=str(model.directory), device="cpu", compile="off", kv=KV, acceptance=rule)
    engine = build_engine(section)
    plain = translate(engine, COUNT)
    near = [*engine.info().decoder_start, *plain]
    if engine.info().is_lossless:
        assert plain == translate(model.engine(), COUNT)
        assert translate(engine, COUNT, propose=drafts_near(near)) == plain
    drafted = [translate(engine, COUNT, SOURCE, SAMPLED, drafts_near(near)) for _ in range(2)]
    assert drafted[0] == drafted[1]  # the same drafts
    assert translate(engine, COUNT, sampling=SAMPLED) == translate(engine, COUNT, sampling=SAMPLED)
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total
