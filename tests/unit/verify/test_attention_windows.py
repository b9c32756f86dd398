"""Layers with an attention window: the text beyond the window is correct, and blocks outside it are freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.kv import KvGroup
from tests.support.engines.engine_sequence import drafts_near, generate, sequence_on, some_tokens
from tests.support.models import tiny
from tests.support.models.model_cases import BLOCK, WINDOW, ModelCase, gemma3, save_case

pytestmark = pytest.mark.slow


def test_text_beyond_the_window_is_the_models_own_with_and_without_trees(case: ModelCase) -> None:
    prompt = some_tokens(19)
    expected = case.reference(prompt, 60)
    assert generate(case.engine(), prompt, 60) == expected
    for seed in range(3):
        assert generate(case.engine(), prompt, 60, propose=drafts_near([*prompt, *expected], seed)) == expected


@pytest.mark.parametrize("chunk", [1, 5, 33])
def test_a_prompt_longer_than_the_window_in_chunks(case: ModelCase, chunk: int) -> None:
    prompt = some_tokens(70, seed=1)
    sequence = replace(sequence_on(case.engine(), prompt), chunk=chunk)
    sequence.open()
    assert sequence.decode(5) == case.reference(prompt, 5)


def test_a_windowed_sequence_holds_only_the_blocks_of_its_window(hybrid: ModelCase) -> None:
    engine = hybrid.engine()
    layout = engine.info().layout
    assert layout.groups == (KvGroup(4, window=WINDOW), KvGroup(1))
    sequence = sequence_on(engine, some_tokens(50))
    sequence.open()
    for _ in range(30):
        sequence.step(drafts_near([*sequence.tokens, 5, 5]))
        kv = engine.info().kv
        assert kv.blocks_total - kv.blocks_free == layout.held(sequence.stored)
    assert layout.held(80) < 80 // BLOCK * layout.tables // 2
    engine.release([sequence.name])
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


def test_a_pool_smaller_than_the_context_suffices_for_a_windowed_sequence(tmp_path: Path) -> None:
    case = save_case(tmp_path, tiny.mistral(sliding_window=WINDOW))
    prompt = some_tokens(20, seed=2)
    assert generate(case.engine(blocks=7), prompt, 100) == case.reference(prompt, 100)


def test_groups_of_different_sizes_share_one_table_and_keep_their_masks(tmp_path: Path) -> None:
    kinds = ["full_attention"] + ["sliding_attention"] * 66
    small = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8}
    case = save_case(tmp_path, gemma3(num_hidden_layers=67, layer_types=kinds, **small))
    engine = case.engine()
    assert engine.info().layout.groups == (KvGroup(),)
    prompt = some_tokens(40, seed=3)
    assert generate(engine, prompt, 5) == case.reference(prompt, 5)


def windowed_reference(case: ModelCase, prompt: Sequence[int], count: int, window: int, sinks: int) -> list[int]:
    """Greedy tokens, each computed over the whole sequence with an explicit mask."""
    model = AutoModelForCausalLM.from_pretrained(case.directory, dtype=torch.float32, attn_implementation="eager")
    tokens = list(prompt)
    for _ in range(count):
        query, key = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))
        seen = (key <= query) & ((query - key < window) | (key < sinks))
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("sinks", [0, 2, 5])
def test_a_configured_window_is_lossy_and_equals_its_explicit_mask(full: ModelCase, sinks: int) -> None:
    prompt = some_tokens(30, seed=4)
    engine = full.engine(blocks=12, window=16, sinks=sinks)
    expected = windowed_reference(full, prompt, 40, 16, sinks)
    assert expected != full.reference(prompt, 40)
    assert generate(engine, prompt, 40) == expected
    assert generate(engine, prompt, 40, propose=drafts_near([*prompt, *expected])) == expected
    assert engine.info().layout.groups == (KvGroup(1, window=16, sinks=sinks),)
