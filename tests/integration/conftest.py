"""The packaged model, a draft that often agrees with it, and what the model alone writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.errors import ModelLoadError
from deploy.settings import load_settings
from tests.support import tiny
from tests.support.live_cluster import Reference, RequestCase
from tests.support.prompts import CHAT, PLAIN
from workers.model.model_files import resolve_model_directory

GREEDY_TOKENS = 16
SAMPLED_TOKENS = 16


@pytest.fixture(scope="session")
def target_directory() -> Path:
    """SmolLM2-135M-Instruct, as `make setup` prepared it."""
    try:
        return resolve_model_directory("smollm2-135m-instruct", load_settings().cache_directory)
    except ModelLoadError as error:
        pytest.fail(f"run `make setup` first: {error}")


@pytest.fixture(scope="session")
def draft_directory(target_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's weights with noise: its drafts are often accepted and often rejected."""
    return tiny.blur(target_directory, tmp_path_factory.mktemp("draft"), noise=0.08)


@pytest.fixture(scope="session")
def reference(target_directory: Path) -> Reference:
    """The model under `transformers`."""
    torch.set_num_threads(2)
    return Reference(target_directory)


@pytest.fixture(scope="session")
def prompts(reference: Reference) -> list[tuple[int, ...]]:
    return [*map(reference.chat, CHAT), *map(reference.plain, PLAIN)]


@pytest.fixture(scope="session")
def greedy(reference: Reference, prompts: list[tuple[int, ...]]) -> dict[RequestCase, tuple[int, ...]]:
    return {RequestCase(prompt, GREEDY_TOKENS): reference.greedy(prompt, GREEDY_TOKENS) for prompt in prompts}


@pytest.fixture(scope="session")
def sampled(reference: Reference, prompts: list[tuple[int, ...]]) -> dict[RequestCase, tuple[int, ...]]:
    cases = [
        RequestCase(prompt, SAMPLED_TOKENS, temperature, top_p, seed)
        for seed, (prompt, (temperature, top_p)) in enumerate(
            zip(prompts[::2], [(0.7, 1.0), (1.0, 0.9), (0.5, 0.95)] * len(prompts), strict=False)
        )
    ]
    return {case: reference.sampled(case) for case in cases}
