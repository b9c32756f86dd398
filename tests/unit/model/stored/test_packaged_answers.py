"""Greedy texts of the packaged models in their own storage are those of their de-quantized weights in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftBudget
from cluster.generation.text.tokenizer import Tokenizer
from deploy.implied_settings import with_implied_settings
from deploy.models import resolve_models
from deploy.settings import load_settings
from tests.support.engines.colocated_decoding import decode_together
from tests.support.engines.engine_sequence import GREEDY, drafts_near, generate
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_group import rank_group
from tests.support.engines.stored_model import check_greedy
from tests.support.models.prompts import PLAIN
from workers.draft.registry import create
from workers.model.model_files import resolve_model_directory
from workers.verify.build import build_engine

pytestmark = [pytest.mark.weights, pytest.mark.slow]

TOKENS = 24
BUDGET = DraftBudget(7, 7)


def reference_of(name: str) -> tuple[Path, PreTrainedModel]:
    """The directory of a packaged model, and its de-quantized weights in float32 by `transformers`."""
    path = resolve_model_directory(name, load_settings().cache_directory)
    return path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def configure(name: str, ranks: int = 1) -> Configuration:
    """A packaged model as `serve` configures it on a CPU, with its default drafts."""
    assignments = [f"target.path={name}", f"target.tensor_parallel={ranks}", "target.kv.pool_bytes=33554432"]
    assignments += [f"target.compile_directory={KEPT}", "target.compile=off"]
    configuration = with_implied_settings(load_settings("cpu", assignments, {}).configuration)
    found = resolve_models(configuration, load_settings().cache_directory, lambda _: None).configuration
    assert (found.target.quantization, found.draft.name) == ("stored", "suffix+recycling")
    return found


@contextmanager
def one_rank(configuration: Configuration) -> Iterator[Any]:
    engine = build_engine(configuration.target, method=create(configuration.draft, configuration.target))
    try:
        yield engine
    finally:
        engine.close()


def checked_texts(engine: Any, path: Path, reference: PreTrainedModel) -> list[list[int]]:
    """The greedy texts of some prompts: alone, with drafts of which some are right, and with the engine's own."""
    tokenizer = Tokenizer.load(path)
    prompts = [tokenizer.encode(text) for text in PLAIN[:2]]
    texts = [generate(engine, prompt, TOKENS) for prompt in prompts]
    for prompt, text in zip(prompts, texts, strict=True):
        check_greedy(reference, prompt, text)
        assert generate(engine, prompt, TOKENS, propose=drafts_near([*prompt, *text])) == text
    accepted = 0
    for turn in ("first", "second"):  # the second one drafts from the texts of the first
        requests = {f"{turn} {index}": (tuple(prompt), GREEDY) for index, prompt in enumerate(prompts)}
        decoded = decode_together(engine.step, requests, TOKENS, BUDGET).values()
        assert [one.answer[:TOKENS] for one in decoded] == texts
        accepted += sum(one.accepted for one in decoded)
    assert accepted > TOKENS
    return texts


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_one_rank_writes_what_the_dequantized_weights_decide(name: str) -> None:
    path, reference = reference_of(name)
    with one_rank(configure(name)) as engine:
        checked_texts(engine, path, reference)


def test_three_ranks_write_the_texts_of_one_rank() -> None:
    name = "smollm2-135m-instruct"
    path, reference = reference_of(name)
    with one_rank(configure(name)) as engine:
        expected = checked_texts(engine, path, reference)
    with rank_group(3) as group:
        assert checked_texts(group.form(configure(name, ranks=3)), path, reference) == expected
