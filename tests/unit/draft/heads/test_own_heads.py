"""Medusa heads of public checkpoints compute what Medusa publishes, in each layout that is in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ModelLoadError
from cluster.core.request import SamplingParameters
from tests.support.models import public_drafts, tiny
from tests.support.models.draft_references import norm
from tests.support.models.public_drafts import HIDDEN, VOCABULARY, Tensors
from workers.draft.common.modules.module_settings import ModuleSettings
from workers.draft.common.modules.served_module import load_served_module
from workers.draft.heads.own_heads import OwnHeads
from workers.model.drafting.public import PublicModule
from workers.model.formats.registry import read_draft
from workers.model.target_ends import read_tensors
from workers.sampling.context import DecisionContext

DEPTHS = 3
STATE = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2))
UNORDERED = [int(one) for one in torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:40]]
AUTHORS: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
VLLM: dict[str, Any] = {"model_type": "medusa", "num_heads": DEPTHS, "num_hidden_layers": 1, "vocab_size": VOCABULARY}


def served(draft: Path, target: Path) -> OwnHeads:
    settings = ModuleSettings(path=str(draft), weights="float32")
    loaded = load_served_module(settings, TargetSection(path=str(target), device="cpu"), "heads", (PublicModule,))
    return OwnHeads(loaded.module, loaded)


Blocks = list[list[tuple[Tensor, Tensor | None]]]
"""Weight and bias of each block of each head."""


def published(blocks: Blocks, heads: list[Tensor], target: Path) -> list[Tensor]:
    """The logits of each head: residual blocks on the last hidden state after the final norm, then its own head."""
    final = norm(STATE, read_tensors(target / "model.safetensors")["model.norm.weight"], 1e-6)
    found = []
    for own, head in zip(blocks, heads, strict=True):
        rows = final
        for weight, bias in own:
            inner = weight @ rows + (0.0 if bias is None else bias)
            rows = rows + inner * torch.sigmoid(inner)
        found.append(head @ rows)
    return found


def of_authors(tensors: Tensors, target: Path, blocks: int = 1) -> list[Tensor]:
    """The logits that the authors' layout stands for."""
    pairs = [
        [
            (tensors[f"{depth}.{block}.linear.weight"], tensors[f"{depth}.{block}.linear.bias"])
            for block in range(blocks)
        ]
        for depth in range(DEPTHS)
    ]
    shared = read_tensors(target / "model.safetensors")["lm_head.weight"]
    return published(pairs, [tensors.get(f"{depth}.{blocks}.weight", shared) for depth in range(DEPTHS)], target)


def assert_ranked(heads: OwnHeads, wanted: list[Tensor], tokens: list[int]) -> None:
    """Assert that the candidates of each depth are the most probable rows, named by their tokens."""
    context = DecisionContext(SamplingParameters(temperature=0.0), (0,), 1)
    (paths,) = heads.rank([STATE], [0], [context] * DEPTHS, 4)
    assert len(wanted) == DEPTHS
    for depth, logits in enumerate(wanted):
        best = [tokens[int(row)] for row in logits.topk(4).indices]
        assert list(paths.tokens[depth][:4]) == best
        assert paths.confidences[depth][0][0] == pytest.approx(float(logits.softmax(-1).max()), rel=1e-4)


@pytest.mark.parametrize(
    ("file", "prefix", "blocks", "has_heads"),
    [
        ("medusa_lm_head.pt", "", 1, True),
        ("medusa_lm_head.pt", "", 2, True),
        ("medusa_lm_head.safetensors", "", 1, False),
        ("medusa_lm_head.safetensors", "", 1, True),
    ],
)
def test_layouts_of_the_authors(
    file: str, prefix: str, blocks: int, has_heads: bool, target: Path, tmp_path: Path
) -> None:
    tensors = public_drafts.medusa(prefix, blocks=blocks, has_heads=has_heads)
    public_drafts.write(tmp_path, AUTHORS, tensors, file)

    heads = served(tmp_path, target)

    assert heads.depths == DEPTHS  # as many as are stored, whatever medusa_num_heads says
    wanted = of_authors(tensors, target, blocks)
    if has_heads:
        mine = heads.logits(heads.hidden([STATE], DEPTHS))[0]
        torch.testing.assert_close(mine, torch.stack(wanted), rtol=1e-5, atol=1e-5)
    assert_ranked(heads, wanted, list(range(VOCABULARY)))


def test_heads_in_the_checkpoint_of_their_target(target: Path, tmp_path: Path) -> None:
    tensors = public_drafts.medusa("medusa_head.")
    whole = read_tensors(target / "model.safetensors") | tensors
    config = tiny.llama().to_dict() | AUTHORS
    public_drafts.write(tmp_path, config, whole)

    heads = served(tmp_path, target)

    own = {name.removeprefix("medusa_head."): value for name, value in tensors.items()}
    assert_ranked(heads, of_authors(own, target), list(range(VOCABULARY)))


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize(("tokens", "has_bias"), [(None, False), (UNORDERED, True)])
def test_the_layout_of_vllm_has_absolute_tokens(
    prefix: str, tokens: list[int] | None, has_bias: bool, target: Path, tmp_path: Path
) -> None:
    tensors = public_drafts.medusa_of_vllm(tokens, has_bias=has_bias)
    stored = {name if name == "token_map" else f"{prefix}{name}": value for name, value in tensors.items()}
    if prefix and tokens is not None:
        stored[f"{prefix}token_map"] = stored.pop("token_map")
    public_drafts.write(tmp_path, VLLM | {"medusa_fc_bias": has_bias}, stored)
    blocks: Blocks = [
        [(tensors[f"blocks.{depth}.layers.0.weight"], tensors.get(f"blocks.{depth}.layers.0.bias"))]
        for depth in range(DEPTHS)
    ]
    wanted = published(blocks, [tensors[f"lm_heads.{depth}.weight"] for depth in range(DEPTHS)], target)

    assert_ranked(served(tmp_path, target), wanted, tokens or list(range(VOCABULARY)))


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"original_lm_head": True}, {}, "original_lm_head .* must be false unless lm_heads.0.weight is the only"),
        ({"medusa_choices": [[0, 0]]}, {}, r"medusa_choices must be at most 256 lists of ranks below 16, each after"),
        ({"hidden_act": "gelu"}, {}, "hidden_act in config.json: 'gelu' is refused"),
        ({"logit_scale": 0.1}, {}, "logit_scale in config.json: 0.1 is refused; it may change"),
        ({}, {"1.0.linear.weight": torch.zeros(4, 4)}, r"1.0.linear.weight must be \[48, 48\], not \[4, 4\]"),
        ({}, {"4.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)}, r"its heads lack \['3.0.bias'"),
        ({}, {"odd": torch.zeros(1)}, r"have \['odd'\] in excess"),
    ],
)
def test_refusals(config: dict[str, Any], change: Tensors, message: str, tmp_path: Path) -> None:
    public_drafts.write(tmp_path, AUTHORS | config, public_drafts.medusa() | change)

    with pytest.raises(ModelLoadError, match=message):
        read_draft(tmp_path)
