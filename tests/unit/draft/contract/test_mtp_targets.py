"""Targets with a layer for multi-token prediction in a cluster: it drafts, and changes no token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import mtp_targets, tiny, tiny_tokenizer
from tests.support.models.mtp_targets import LAYERS
from tests.unit.draft.contract.methods import HIDDEN, VOCABULARY
from tests.unit.draft.contract.test_public_drafts import (
    answers,
    answers_alone,
    check_right_to_the_last_depth,
    configured,
)

DEPTH = 4


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp(request.param) / "target")
    tiny.save(directory, mtp_targets.config(request.param, VOCABULARY))
    mtp_targets.add_layer(directory, sureness=4.0)
    return directory


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("deepseek_v3", "target"),
        ("glm4_moe", "drafter"),
        pytest.param("deepseek_v3", "drafter", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "target", marks=pytest.mark.slow),
    ],
    indirect=["target"],
)
async def test_the_layer_of_the_target_changes_no_token(place: str, target: Path) -> None:
    plain = await answers_alone(target)

    drafted = await answers(configured(target, "draft.method=mtp", f"draft.placement={place}"))

    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert all(one.drafted > 0 for one in drafted)


@pytest.fixture(scope="module")
def successors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers add nothing, so that the token before decides alone, with a layer that does the same.

    Its projection takes the embedding of the token and no hidden state.
    """
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp(request.param) / "target")
    tiny.save(directory, mtp_targets.config(request.param, VOCABULARY))
    mtp_targets.add_layer(directory, sureness=20.0)
    weights, own = load_file(directory / "model.safetensors"), f"model.layers.{LAYERS}."
    for name, value in weights.items():
        if "down_proj" in name or name.endswith("o_proj.weight"):
            value.zero_()
    weights[f"{own}enorm.weight"].fill_(1.0)
    weights[f"{own}eh_proj.weight"].copy_(torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1))
    weights[f"{own}shared_head.norm.weight"].copy_(weights["model.norm.weight"])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("successors", "candidates", "nodes"),
    [
        pytest.param("deepseek_v3", 1, DEPTH, id="deepseek_v3-chain"),
        pytest.param("deepseek_v3", 3, 12, id="deepseek_v3-tree", marks=pytest.mark.slow),
        pytest.param("glm4_moe", 1, DEPTH, id="glm4_moe-chain", marks=pytest.mark.slow),
        pytest.param("glm4_moe", 3, 12, id="glm4_moe-tree"),
    ],
    indirect=["successors"],
)
async def test_a_layer_that_knows_the_target_is_right_to_the_last_depth(
    candidates: int, nodes: int, successors: Path
) -> None:
    """Greedy and sampled: each depth is fed with the token drafted before it, with the noise of its own position."""
    drawn = ["draft.method=mtp", "draft.mtp.weights=float32", f"draft.mtp.candidates={candidates}"]
    plain = await answers_alone(successors)

    drafted = await answers(configured(successors, *drawn, f"draft.max_nodes={nodes}", f"draft.max_depth={DEPTH}"))

    check_right_to_the_last_depth(drafted, plain, per_step=DEPTH + 1, least_distinct=DEPTH + 1)
