"""Families with attention or positions in code of their own: no draft changes the text of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_rows import PROMPT, SAMPLED, decode, first_row, open_engine, reference
from tests.support.engines.engine_sequence import drafts_near
from tests.support.models import tiny
from tests.support.slow import slow_but
from tests.zoo.configs import tiny_config
from workers.model.loading import load_model
from workers.verify.engine import TargetEngine

COUNT = 30
NEIGHBOR = tuple(range(10, 23))
SIX_HEADS = {"hidden_size": 48, "num_attention_heads": 6}
"""ALiBi has other slopes where the number of heads is no power of two."""
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Falcon with one KV head": ("falcon", {}),
    "Falcon with KV groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon with KV groups and one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "Falcon with ALiBi and biases": (
        "falcon",
        SIX_HEADS | {"alibi": True, "multi_query": False, "num_kv_heads": 6, "parallel_attn": False, "bias": True},
    ),
    "Falcon with ALiBi and one KV head": ("falcon", SIX_HEADS | {"alibi": True}),
    "BLOOM": ("bloom", {"n_head": 4}),
    "BLOOM with six heads": ("bloom", {"hidden_size": 48, "n_head": 6}),
    "MPT": ("mpt", {}),
    "MPT with six heads": ("mpt", {"d_model": 48, "n_heads": 6}),
    "GPT-J": ("gptj", {}),
    "CodeGen": ("codegen", {}),
    "GPT-Neo": ("gpt_neo", {}),
    "GPT-NeoX-Japanese": ("gpt_neox_japanese", {}),
    "GPT": ("openai-gpt", {}),
    "XGLM": ("xglm", {}),
    "LongCat": ("longcat_flash", {}),
    "Zamba2": ("zamba2", {}),
}


def config(family: str) -> PreTrainedConfig:
    """A tiny configuration of a family, whose weights do not write one token again and again."""
    model_type, changes = FAMILIES[family]
    found = tiny_config(model_type)
    for name, value in changes.items():
        setattr(found, name, value)
    if model_type == "mpt":
        found.attn_config.clip_qkv = 0.5
    found.tie_word_embeddings = False
    return found


@pytest.fixture(scope="module", params=slow_but(("Falcon with KV groups", "BLOOM"), FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), config(request.param), seed=1)


@pytest.fixture(scope="module")
def engine(directory: Path) -> TargetEngine:
    return open_engine(directory)


def test_it_passes_the_trial(directory: Path) -> None:
    assert load_model(ModelSection(path=str(directory), device="cpu", compile="off"), trial=True).layers


def test_no_draft_changes_the_text_of_transformers(engine: TargetEngine, directory: Path) -> None:
    expected = reference(directory, PROMPT, COUNT)
    assert len(set(expected)) > 3  # it does not repeat one token
    assert decode(engine, PROMPT, COUNT) == expected
    counted = {"steps": 0}
    drafting = drafts_near([*PROMPT, *expected])

    def propose(tokens: Any) -> Any:
        counted["steps"] += 1
        return drafting(tokens)

    assert decode(engine, PROMPT, COUNT, propose=propose) == expected
    assert counted["steps"] < COUNT - 5  # drafts were accepted


def test_positions_begin_behind_that_of_padding_as_in_a_dense_pass(tmp_path: Path) -> None:
    """`generate` counts from 0, unlike the pass of which such models learn."""
    directory = tiny.save(tmp_path, tiny_config("roberta"), seed=1)  # 128 positions, of which padding has the first
    model, text = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), list(PROMPT)
    with torch.inference_mode():
        for _ in range(8):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    assert decode(open_engine(directory), PROMPT, 8) == text[len(PROMPT) :]
    assert load_model(ModelSection(path=str(directory), device="cpu", compile="off")).max_context_len == 127
    with pytest.raises(ConfigurationError, match="128 is refused; it must be at most 127: its positions begin behind"):
        load_model(ModelSection(path=str(directory), device="cpu", compile="off"), max_context_len=128)


@pytest.mark.slow
def test_a_layer_with_two_attention_modules_is_one_layer_for_taps(tmp_path: Path) -> None:
    model = load_model(ModelSection(path=str(tiny.save(tmp_path, config("LongCat"))), device="cpu", compile="off"))
    assert (model.depth, len(model.layers)) == (4, 8)


def test_a_neighbor_does_not_change_the_text(engine: TargetEngine) -> None:
    alone = decode(engine, PROMPT, 10)
    rows = [first_row("a", PROMPT), first_row("b", NEIGHBOR, SAMPLED)]
    texts = {"a": list(PROMPT), "b": list(NEIGHBOR)}
    while len(texts["a"]) < len(PROMPT) + 10:
        for row, verdict in zip(rows, engine.step(StepBatch(tuple(rows))).verdicts, strict=True):
            assert verdict.fault is None
            texts[row.sequence_id] += verdict.tokens
        rows = [VerifyRow(SequenceId(name), len(text), (text[-1],)) for name, text in texts.items()]
    assert texts["a"][len(PROMPT) :] == alone
    engine.release_all()
