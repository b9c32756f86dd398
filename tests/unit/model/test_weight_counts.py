"""The weights of a model are counted from the headers of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from workers.model.weight_counts import count_layers, count_mtp_layer, count_weights


def save(directory: Path, **shapes: tuple[int, ...]) -> Path:
    tensors = {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_a_tied_head_multiplies_and_an_embedding_does_not(tmp_path: Path) -> None:
    directory = save(
        tmp_path, model__embed_tokens__weight=(10, 4), model__layers__0__up__weight=(8, 4), model__norm__weight=(4,)
    )
    counts = count_weights(directory)
    assert (counts.parameters, counts.multiply_adds, counts.source_parameters) == (40 + 32 + 4, 32 + 40, 0)


def test_an_encoder_computes_once_for_a_source(tmp_path: Path) -> None:
    shapes = {
        "model__shared__weight": (10, 4),
        "final_logits_bias": (1, 10),
        "model__encoder__layers__0__fc1__weight": (8, 4),
        "model__encoder__embed_positions__weight": (6, 4),
        "model__decoder__layers__0__encoder_attn__k_proj__weight": (4, 4),
        "model__decoder__layers__0__encoder_attn__q_proj__weight": (4, 4),
    }
    counts = count_weights(save(tmp_path, **shapes))
    assert counts.multiply_adds == 16 + 40  # the query projection and the tied head
    assert counts.source_parameters == 32 + 24 + 16


@pytest.mark.parametrize("own", ["model__layers__1", "mtp", "model__mtp_layers__0"])
def test_a_layer_for_multi_token_prediction_computes_for_drafts_alone(own: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
    shapes = {
        "model__embed_tokens__weight": (10, 4),
        "model__layers__0__up__weight": (8, 4),
        f"{own}__up__weight": (8, 4),
        f"{own}__eh_proj__weight": (4, 8),
        f"{own}__embed_tokens__weight": (10, 4),
        "lm_head__weight": (10, 4),
    }
    directory = save(tmp_path, **shapes)
    assert count_weights(directory).multiply_adds == 32 + 40
    assert count_layers(directory) == 1
    assert count_mtp_layer(directory) == 32 + 32 + 40
