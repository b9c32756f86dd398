"""Heads for encoder-decoder targets: what they share with the target, and their drafts on an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import EvidenceSection, KvSection
from cluster.core.drafting import DraftBudget
from cluster.core.errors import ModelLoadError
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from tests.support.engines.colocated_decoding import decode_together
from tests.support.engines.engine_sequence import GREEDY, some_tokens
from tests.support.engines.sourced import SAMPLED, SOURCE, SourcedModel, sourced, translate
from tests.support.models import drafting_modules, tiny
from tests.zoo.configs import tiny_config
from workers.draft.registry import create
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.model.draft_shapes import HeadsShape
from workers.model.drafting.files import load_ends
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration
from workers.verify.decider import LocalDecider, decider_of_model
from workers.verify.engine import EngineOptions, TargetEngine

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TEXT = tuple(some_tokens(14, 3))
COUNT = 18
SOURCES = {"greedy": SOURCE, "sampled": tuple(some_tokens(23, 8)), "penalised": (7, 2), "other": SOURCE}
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalised": SamplingParameters(temperature=0.8, seed=3, repetition_penalty=1.8, presence_penalty=0.5),
    "other": SamplingParameters(temperature=1.0, top_k=20, seed=9),
}


def last_states(model: SourcedModel, native: str, tokens: Sequence[int], tree: TokenTree) -> torch.Tensor:
    """The tap after the last decoder layer, of tokens and nodes."""
    loaded = load_model(
        ModelSection.model_validate(
            {"path": str(model.directory), "device": "cpu", "native": native, "compile": "off"},
        )
    )
    pool = KvPool(loaded.kv_spec, KvSection(block_size=4), blocks=60)
    store, table, layers = SourceStore(pool), pool.new_table(), len(loaded.layers)
    runner = ModelRunner(loaded, pool, taps=(0, layers))
    source = store.acquire(SOURCE, "")
    runner.encode([source], store)
    row = ForwardRow(table, tuple(tokens), tree, source=source)
    pool.reserve(table, row.end)
    runner.forward([row])
    assert runner.hidden is not None
    return runner.hidden[:, runner.hidden.shape[1] // 2 :]


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("vocabulary", [None, (0, 2, 5, 40, 95)])
def test_the_targets_end_makes_its_own_logits_of_the_last_tap(
    model: SourcedModel, native: str, vocabulary: tuple[int, ...] | None
) -> None:
    tree = TokenTree((9, 10, 11), (-1, 0, 0))
    states = last_states(model, native, TEXT, tree)
    reduced = None if vocabulary is None else torch.tensor(vocabulary)
    card = drafting_modules.card_for(model.directory, "heads", (2,), None if vocabulary is None else len(vocabulary))
    ends = load_ends(model.directory, card, reduced, torch.float32, CPU)
    found = ends.logits(ends.normalised(states))
    reference, rows = model.reference(), list(vocabulary or range(tiny.VOCABULARY))
    for path, chosen in (((), range(len(TEXT))), ((9,), [len(TEXT)]), ((9, 11), [len(TEXT), len(TEXT) + 2])):
        with torch.inference_mode():
            written = torch.tensor([[*TEXT, *path]])
            logits = reference(input_ids=torch.tensor([SOURCE]), decoder_input_ids=written).logits[0][:, rows]
        torch.testing.assert_close(found[list(chosen)], logits[-len(chosen) :], rtol=2e-2, atol=0.12)
    hidden = torch.randn(3, ends.hidden_size, generator=torch.Generator().manual_seed(0))
    some = torch.tensor([[0, 1], [2, 4], [3, 0]])
    torch.testing.assert_close(ends.logits_of(some, hidden), ends.logits(hidden).gather(1, some))


@pytest.mark.parametrize("family", ["bigbird_pegasus", "mbart"])
def test_a_decoder_with_another_end_is_refused(family: str, tmp_path: Path) -> None:
    AutoModelForSeq2SeqLM.from_config(tiny_config(family)).save_pretrained(tmp_path)
    card = drafting_modules.card_for(tmp_path, "heads", (1,))
    with pytest.raises(ModelLoadError, match="ends with a norm other than an RMS norm; needed T5, Marian or BART"):
        load_ends(tmp_path, card, None, torch.float32, CPU)


def drafting_engine(model: SourcedModel, heads: Path) -> tuple[TargetEngine, DraftMethod]:
    """An engine that drafts with heads after each step."""
    configuration = load_configuration(
        {
            "target": {"path": str(model.directory), "device": "cpu", "evidence": {"taps": (2,)}},
            "draft": {"method": "heads", "heads": {"path": str(heads), "weights": "float32"}},
        }
    )
    method = create(configuration.draft, configuration.target)
    loaded = load_model(ModelSection(path=str(model.directory), device="cpu"))
    pool = KvPool(loaded.kv_spec, KvSection(block_size=4), 300)
    decider = decider_of_model(loaded, LocalDecider())
    evidence = EvidenceSection(taps=(2,))
    return TargetEngine(loaded, pool, decider, EngineOptions(method=method, evidence=evidence)), method


def test_drafts_of_several_sequences_change_none_of_them_and_a_release_frees_everything(
    model: SourcedModel, tmp_path: Path
) -> None:
    shape = HeadsShape(depths=3, mix_rank=16, selector_rank=8)
    drafting_modules.save(model.directory, tmp_path / "heads", "heads", (2,), shape=shape)
    plain = {name: translate(model.engine(), COUNT, SOURCES[name], SAMPLINGS[name]) for name in SOURCES}
    engine, method = drafting_engine(model, tmp_path / "heads")
    first = sourced(engine)
    prompts = {
        name: (tuple(first.tokens), sourced(engine, sampling=sampling).start.sampling)
        for name, sampling in SAMPLINGS.items()
    }
    found = decode_together(engine.step, prompts, COUNT, DraftBudget(6, 3), SOURCES)
    assert {name: one.answer[:COUNT] for name, one in found.items()} == plain
    assert all(one.deepest > 0 for one in found.values())
    assert engine.info().kv.blocks_free < engine.info().kv.blocks_total
    engine.release([SequenceId(name) for name in SOURCES])
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total
    assert len(method._sessions) == 0  # type: ignore[attr-defined]
