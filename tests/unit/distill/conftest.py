"""A tiny target of six layers, and texts that it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models import tiny
from workers.distill.answers import Answer
from workers.distill.eagle3.texts import WritingPlan, continuations
from workers.distill.target_model import load_target

LAYERS, PROMPT, LENGTH, ROWS = 6, 5, 14, 24
"""Layers of the target, tokens of a prompt and of an answer, number of texts."""


@pytest.fixture(scope="package")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With large weights, so that the target's distributions are not nearly uniform."""
    config = tiny.llama(num_hidden_layers=LAYERS, tie_word_embeddings=True, initializer_range=0.15)
    return tiny.save(tmp_path_factory.mktemp("target"), config)


@pytest.fixture(scope="package")
def target(directory: Path) -> PreTrainedModel:
    return load_target(directory, torch.device("cpu"))


@pytest.fixture(scope="package")
def answers(target: PreTrainedModel) -> tuple[Answer, ...]:
    """Greedy ones."""
    prompts = torch.randint(3, tiny.VOCABULARY, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    written = continuations(target, prompts, [0.0] * ROWS, WritingPlan(LENGTH, (), 0))
    return tuple(
        Answer(f"prompts:{row}", "", 0.0, False, tuple(prompt), answer)
        for row, (prompt, answer) in enumerate(zip(prompts, written, strict=True))
    )
