"""Greedy texts of the packaged models in their own storage are those of their de-quantized weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.generation.text.tokenizer import Tokenizer
from deploy.settings import load_settings
from tests.support.engines.engine_sequence import drafts_near, generate
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.stored_model import check_greedy
from tests.support.models.prompts import PLAIN
from workers.model.model_files import resolve_model_directory
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine

pytestmark = [pytest.mark.weights, pytest.mark.slow]

TOKENS = 24


def reference_of(name: str) -> tuple[Path, PreTrainedModel]:
    """The directory of a packaged model, and its de-quantized weights in float32 by `transformers`."""
    path = resolve_model_directory(name, load_settings().cache_directory)
    return path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def configure(path: Path) -> Any:
    target: dict[str, Any] = {"path": str(path), "device": "cpu", "compile": "off", "compile_directory": str(KEPT)}
    target |= {"quantization": "stored", "kv": {"pool_bytes": 32 << 20}}
    return load_configuration({"target": target})


def check_texts(engine: Any, path: Path, reference: PreTrainedModel) -> None:
    """Check texts, alone and with drafts of which some are right."""
    tokenizer = Tokenizer.load(path)
    for text in PLAIN[:2]:
        prompt = tokenizer.encode(text)
        answer = generate(engine, prompt, TOKENS)
        check_greedy(reference, prompt, answer)
        assert generate(engine, prompt, TOKENS, propose=drafts_near([*prompt, *answer])) == answer


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_texts_alone_and_with_drafts(name: str) -> None:
    path, reference = reference_of(name)
    engine = build_engine(configure(path).target)
    try:
        check_texts(engine, path, reference)
    finally:
        engine.close()
