"""Families of other parts than T5, Marian and BART write what `transformers` writes.

Biases of positions in each layer (UMT5), attention code of their own (FSMT, LED, MVP), windows, soft caps and rotated
queries (T5Gemma), a language model as decoder (BERT), parts of other names (SeamlessM4T). A random model repeats one
token again and again, so no token may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_rows import verify
from tests.support.engines.engine_sequence import GREEDY, drafts_near, some_tokens
from tests.support.engines.sourced import SOURCE, SourcedModel, greedy_answer, sourced, translate
from tests.zoo.verdict import save
from workers.model.kernel_handover import relative_error
from workers.model.loading import load_model
from workers.verify.engine import TargetEngine

pytestmark = pytest.mark.slow

FAMILIES = ("encoder-decoder", "fsmt", "led", "mvp", "seamless_m4t", "t5gemma", "umt5")
SOURCES = (SOURCE, (7,), tuple(some_tokens(31, 1)), tuple(some_tokens(12, 2)))
"""Longer than a window, and so different in length that some are read beside others, padded, and some alone."""
START, COUNT = 2, 16
PADDING = 0
"""A token to which some families give no position, so that they do not write it."""
SAMPLING = replace(GREEDY, no_repeat_ngram_size=1)


def saved(family: str, directory: Path, settings: Mapping[str, Any]) -> SourcedModel:
    """A random model of a family, whose configuration has these values."""
    torch.manual_seed(0)
    save(family, directory / "saved", **settings)
    fixed = {"decoder_start_token_id": START, "no_repeat_ngram_size": 1, "bad_words_ids": [[PADDING]]}
    return SourcedModel(directory / "saved").with_generation_config(directory / family, **fixed)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SourcedModel:
    return saved(request.param, tmp_path_factory.mktemp("models"), {})


@pytest.fixture(scope="module")
def engine(model: SourcedModel) -> TargetEngine:
    return model.engine()


@pytest.fixture(scope="module")
def answers(model: SourcedModel) -> list[list[int]]:
    """The greedy answers of `transformers` to `SOURCES`."""
    reference = model.reference()
    found = [greedy_answer(reference, source, COUNT) for source in SOURCES]
    assert len({tuple(answer) for answer in found}) > 1
    return found


def test_greedy_texts_are_those_of_transformers_with_and_without_drafts(
    engine: TargetEngine, answers: list[list[int]]
) -> None:
    for source, answer in zip(SOURCES, answers, strict=True):
        assert translate(engine, COUNT, source, SAMPLING) == answer
        assert translate(engine, COUNT, source, SAMPLING, drafts_near([START, *answer])) == answer
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


def test_a_chain_and_a_path_of_a_tree_are_accepted(engine: TargetEngine, answers: list[list[int]]) -> None:
    answer = answers[0]
    for tree in (TokenTree.chain(answer[:7]), TokenTree.from_candidates([[3, 4], answer[:7], [answer[0], 3]], 16)):
        sequence = sourced(engine, sampling=SAMPLING)
        sequence.open()
        verdict = verify(engine, VerifyRow(sequence.name, 1, tuple(sequence.tokens), tree))
        engine.release([sequence.name])
        assert (verdict.tokens, verdict.accepted) == (tuple(answer[:8]), 7)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("switch_transformers", {"expert_capacity": 1}),
        ("nllb-moe", {"moe_eval_capacity_token_fraction": 0.01}),
        ("nllb-moe", {"moe_eval_capacity_token_fraction": 0.0, "expert_capacity": 1}),
    ],
)
def test_no_token_of_a_step_keeps_another_one_from_an_expert(
    family: str, settings: dict[str, float], tmp_path: Path
) -> None:
    """`transformers` bounds the tokens of an expert in a pass, and writes an answer in passes of one token."""
    model = saved(family, tmp_path, settings)
    engine, reference = model.engine(), model.reference()
    for source in SOURCES[:2]:
        answer = greedy_answer(reference, source, COUNT)
        assert len(set(answer)) > 3
        assert translate(engine, COUNT, source, SAMPLING) == answer
        assert translate(engine, COUNT, source, SAMPLING, drafts_near([START, *answer])) == answer
    load_model(TargetSection(path=str(model.directory), device="cpu", compile="off"), trial=True)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bigbird_pegasus", {"block_size": 2, "num_random_blocks": 1}),
        ("led", {"attention_window": [4, 8, 4, 8]}),
        ("longt5", {"local_radius": 3}),
        ("longt5", {"local_radius": 3, "encoder_attention_type": "transient-global", "global_block_size": 4}),
        ("nllb-moe", {"moe_eval_capacity_token_fraction": 0.2}),
        ("pegasus_x", {"block_size": 4, "num_global_tokens": 3}),
        ("switch_transformers", {"expert_capacity": 2}),
    ],
)
def test_an_encoder_reads_a_source_alike_whatever_it_reads_before_and_beside(
    family: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model = saved(family, tmp_path, settings)
    loaded = load_model(TargetSection(path=str(model.directory), device="cpu", compile="off"))
    assert loaded.source is not None
    sources = [tuple(some_tokens(length, length)) for length in (31, 12, 27, 30, 6, 19, 17)]
    expected = [new_encoder_reads(model, source) for source in sources]
    for _ in range(2):
        found: dict[int, torch.Tensor] = {}
        for batch in loaded.source.encoder.encode(sources, torch.device("cpu")):
            lengths = [len(sources[index]) for index in batch.indices]
            found |= dict(zip(batch.indices, torch.split(batch.hidden, lengths), strict=True))
        for index, source in enumerate(sources):
            assert relative_error(found[index].float(), expected[index]) < 0.02, len(source)


def new_encoder_reads(model: SourcedModel, source: tuple[int, ...]) -> torch.Tensor:
    """What an encoder of `transformers` that has read nothing before makes of a source, `[tokens, hidden]`."""
    with torch.inference_mode():
        found: torch.Tensor = model.reference().get_encoder()(torch.tensor([source])).last_hidden_state[0]
    return found


def test_sources_that_are_read_beside_each_other_are_read_as_alone(
    engine: TargetEngine, answers: list[list[int]]
) -> None:
    rows = []
    for index, (source, answer) in enumerate(zip(SOURCES, answers, strict=True)):
        one = sourced(engine, source, f"s{index}", SAMPLING)
        tree = TokenTree.from_candidates([[3, *answer[:2]], answer[:5]], 12)
        rows.append(VerifyRow(one.name, 1, tuple(one.tokens), tree, start=one.start))
    verdicts = engine.step(StepBatch(tuple(rows))).verdicts
    engine.release([row.sequence_id for row in rows])
    assert [verdict.tokens for verdict in verdicts] == [tuple(answer[:6]) for answer in answers]
    assert {verdict.accepted for verdict in verdicts} == {5}
