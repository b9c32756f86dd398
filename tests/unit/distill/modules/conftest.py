"""A tiny target, its greedy answers, and their stored hidden states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models import tiny
from workers.distill.answers import Answer, Leading
from workers.distill.modules.tap_cache import TapCache, taps_of
from workers.distill.target_model import load_target

PROMPT, LENGTH, ROWS = 5, 14, 24
_CONFIG = tiny.llama(num_hidden_layers=3, tie_word_embeddings=True, initializer_range=0.15)
"""A model with large weights, so that the target's distributions are not nearly uniform."""


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), _CONFIG)


@pytest.fixture(scope="session")
def target(target_directory: Path) -> PreTrainedModel:
    return load_target(target_directory, torch.device("cpu"))


@pytest.fixture(scope="session")
def answers(target: PreTrainedModel) -> tuple[Answer, ...]:
    """Greedy answers with the target's eight most probable tokens at each position."""
    tokens = torch.randint(3, tiny.VOCABULARY, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for _ in range(LENGTH):
            tokens = torch.cat([tokens, target(input_ids=tokens).logits[:, -1:].argmax(-1)], dim=1)
        best = target(input_ids=tokens).logits[:, PROMPT - 1 : -1].log_softmax(-1).topk(8)
    return tuple(
        Answer(
            f"prompts:{row}:0:0:0",
            "",
            0.0,
            row >= ROWS - 6,
            tuple(tokens[row, :PROMPT].tolist()),
            tuple(tokens[row, PROMPT:].tolist()),
            Leading(best.indices[row].numpy().astype(np.int32), best.values[row].numpy().astype(np.float16)),
        )
        for row in range(ROWS)
    )


@pytest.fixture(scope="session")
def tap_cache_of(
    target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[int, ...]], TapCache]:
    """The stored hidden states of all answers after so many layers."""

    def make(taps: tuple[int, ...]) -> TapCache:
        cache = TapCache(tmp_path_factory.mktemp("taps"), taps, 48, 64)
        cache.fill(partial(taps_of, target), answers, lambda done, wanted: None)
        return cache

    return make
