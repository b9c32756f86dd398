"""Layers with latent attention store latents: one record per token for all heads, and no value beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from tests.support.models import tiny
from workers.forward.latent_heads import latent_heads
from workers.kv.pool import KvPool
from workers.kv.pool_size import block_bytes
from workers.kv.spec import LayerShape
from workers.model.loading import load_model

HEADS, KEY, ROTARY, VALUE, LATENT = 6, 8, 8, 12, 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("latent"), tiny.deepseek_v3())


def section(directory: Path, **values: Any) -> ModelSection:
    return ModelSection(path=str(directory), device="cpu", compile="off", **values)


def test_a_token_takes_one_record_per_layer_and_nothing_for_its_values(directory: Path) -> None:
    model = load_model(section(directory), trial=True)
    assert model.layers == (LayerShape(1, LATENT + ROTARY, heads_per_kv=HEADS, latent_dim=LATENT),) * 2
    pool = KvPool(model.kv_spec, KvSection(block_size=4), 8)
    stored = (*pool.keys, *pool.values)
    assert sum(one.nbytes for one in stored) == 8 * block_bytes(pool.kv_groups, torch.float32)
    assert block_bytes(pool.kv_groups, torch.float32) == 4 * 2 * (LATENT + ROTARY) * 4
    expanded = 2 * HEADS * (KEY + ROTARY)  # keys of all heads, and values padded to their width
    assert block_bytes(pool.kv_groups, torch.float32) * 8 == expanded * 4 * 2 * 4


def test_the_matrix_that_expanded_latents_is_freed(directory: Path) -> None:
    layers = [part for part in load_model(section(directory)).module.modules() if latent_heads(part) is not None]
    assert len(layers) == 2
    assert all(part.kv_b_proj is None for part in layers)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_trial_compares_latents_with_the_dense_pass_of_the_family(quantization: str, directory: Path) -> None:
    model = load_model(section(directory, quantization=quantization), trial=True)
    assert model.layers[0].latent_dim == LATENT


def test_a_layer_that_expands_latents_in_another_way_keeps_keys_and_values(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = modeling_deepseek_v3.DeepseekV3Attention.expand_kv

    def expand(self: nn.Module, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = original(self, latent, rotated)
        return keys, values.flip(1)

    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv", expand)
    assert load_model(section(directory), trial=True).layers == (LayerShape(HEADS, KEY + ROTARY),) * 2
