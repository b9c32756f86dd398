"""Targets with a layer for multi-token prediction in a cluster: it drafts, and changes no token."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.kept_kernels import KEPT
from tests.support.models import mtp_targets, quantized, tiny, tiny_tokenizer
from tests.support.models.mtp_targets import LAYERS, OTHERS, names_of
from tests.unit.draft.contract.methods import VOCABULARY
from tests.unit.draft.contract.test_public_drafts import (
    answers,
    answers_alone,
    check_right_to_the_last_depth,
    configured,
)

DEPTH = 4
STATES = "target.kv.sequences=64"
"""Room for recurrent states: a step needs one for each node of a tree, so with fewer trees are cut."""
CHANGED = ("enorm", "eh_proj", "post_norm")


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
        pytest.param("qwen3_next", "target", marks=pytest.mark.slow),
        pytest.param("mimo", "drafter", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "drafter", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "target", marks=pytest.mark.slow),
    ],
    indirect=["target"],
)
async def test_the_layer_of_the_target_changes_no_token(place: str, target: Path) -> None:
    plain = await answers_alone(target)

    drafted = await answers(configured(target, "draft.method=mtp", f"draft.placement={place}", STATES))

    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert all(one.drafted > 0 for one in drafted)


async def test_the_layer_of_a_target_in_8_bits_changes_no_token(tmp_path: Path) -> None:
    """The target's matrices stay as they are stored; those of the layer are de-quantized."""
    source, stored = tiny_tokenizer.byte_level(tmp_path / "source"), tmp_path / "stored"
    tiny.save(source, mtp_targets.config("mimo", VOCABULARY))
    mtp_targets.add_layer(source, sureness=4.0)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    quantized.save(source, stored, quantized.fp8(16, 16), settings)
    for file in source.iterdir():
        if not (stored / file.name).exists():
            shutil.copy(file, stored)
    as_stored = f"target.compile_directory={KEPT}", "target.quantization=stored"
    plain = await answers(configured(stored, *as_stored))

    drafted = await answers(configured(stored, *as_stored, "draft.method=mtp"))

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
    weights, family = load_file(directory / "model.safetensors"), request.param
    for name, value in weights.items():
        if "down_proj" in name or name.endswith(("o_proj.weight", "out_proj.weight")):
            value.zero_()
    if family in OTHERS:
        own, parts = names_of(family)
        enorm, projection, norm = ({part: one for one, part in parts.items()}[one] for one in CHANGED)
    else:
        own, enorm, projection, norm = f"model.layers.{LAYERS}.", "enorm", "eh_proj", "shared_head.norm"
    size = len(weights["model.norm.weight"])
    halves = [torch.eye(size), torch.zeros(size, size)]
    weights[f"{own}{enorm}.weight"].fill_(0.0 if family.startswith("qwen3") else 1.0)  # Qwen's norms add one
    weights[f"{own}{projection}.weight"].copy_(torch.cat(halves[::-1] if family == "mimo" else halves, dim=1))
    weights[f"{own}{norm}.weight"].copy_(weights["model.norm.weight"])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("successors", "candidates", "nodes"),
    [
        pytest.param("deepseek_v3", 1, DEPTH, id="deepseek_v3-chain"),
        pytest.param("deepseek_v3", 3, 12, id="deepseek_v3-tree", marks=pytest.mark.slow),
        pytest.param("glm4_moe", 1, DEPTH, id="glm4_moe-chain", marks=pytest.mark.slow),
        pytest.param("glm4_moe", 3, 12, id="glm4_moe-tree"),
        pytest.param("qwen3_next", 1, DEPTH, id="qwen3_next-chain", marks=pytest.mark.slow),
        pytest.param("mimo", 3, 12, id="mimo-tree", marks=pytest.mark.slow),
    ],
    indirect=["successors"],
)
async def test_a_layer_that_knows_the_target_is_right_to_the_last_depth(
    candidates: int, nodes: int, successors: Path
) -> None:
    """Greedy and sampled: each depth is fed with the token drafted before it, with the noise of its own position."""
    drawn = [STATES, "draft.method=mtp", "draft.mtp.weights=float32", f"draft.mtp.candidates={candidates}"]
    plain = await answers_alone(successors)

    drafted = await answers(configured(successors, *drawn, f"draft.max_nodes={nodes}", f"draft.max_depth={DEPTH}"))

    check_right_to_the_last_depth(drafted, plain, per_step=DEPTH + 1, least_distinct=DEPTH + 1)
