"""Hydra heads compute what their authors publish: each depth reads the tokens drafted before it."""

from __future__ import annotations

from collections.abc import Sequence
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
from tests.support.models.public_drafts import HIDDEN, HYDRA, VOCABULARY, Tensors
from workers.draft.common.modules.module_settings import ModuleSettings, Weights
from workers.draft.common.modules.ranked_paths import RankedPaths
from workers.draft.common.modules.served_module import load_served_module
from workers.draft.heads.hydra_heads import HydraHeads
from workers.model.drafting.public import PublicModule
from workers.model.formats.registry import read_draft
from workers.model.target_ends import read_tensors
from workers.sampling.context import DecisionContext
from workers.sampling.noise import gumbel

DEPTHS, LAST, KNOWN = 3, 7, 11
STATES = public_drafts.Draw(17).matrix(2, HIDDEN)
GREEDY = SamplingParameters(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama())


def served(draft: Path, target: Path, weights: Weights = "float32") -> HydraHeads:
    settings = ModuleSettings(path=str(draft), weights=weights)
    loaded = load_served_module(settings, TargetSection(path=str(target), device="cpu"), "heads", (PublicModule,))
    return HydraHeads(loaded.module, loaded)


def published(tensors: Tensors, target: Path, state: Tensor, path: Sequence[int]) -> Tensor:
    """The logits after `path`, which begins with the last committed token."""
    stored, depth = read_tensors(target / "model.safetensors"), len(path) - 1
    final = norm(state, stored["model.norm.weight"], 1e-6)
    rows = torch.cat([final, *(stored["model.embed_tokens.weight"][token] for token in path)])
    for block in range(2):
        parts = {name: tensors.get(f"hydra_mlp.{depth}.{block}.{name}.weight") for name in ("linear", "res_connection")}
        linear, residual = (
            rows if weight is None else weight @ rows + tensors[f"hydra_mlp.{depth}.{block}.{name}.bias"]
            for name, weight in parts.items()
        )
        rows = residual + linear * torch.sigmoid(linear)
    return tensors[f"hydra_lm_head.{depth}.weight"] @ rows + tensors[f"hydra_lm_head.{depth}.bias"]


def ranked(heads: HydraHeads, siblings: int, sampling: SamplingParameters = GREEDY) -> list[RankedPaths]:
    """The candidates of two rows in one pass."""
    contexts = [
        DecisionContext(sampling, (0,) * (KNOWN + depth), 1) for _ in range(len(STATES)) for depth in range(DEPTHS)
    ]
    return heads.rank(list(STATES), [LAST, LAST + 1], contexts, siblings)


@pytest.mark.parametrize("siblings", [1, 4])
def test_candidates_along_all_paths_are_the_published_ones(siblings: int, target: Path, tmp_path: Path) -> None:
    tensors = public_drafts.hydra()
    heads = served(public_drafts.write(tmp_path, HYDRA, tensors, "hydra_lm_head.pt"), target)

    for row, found in enumerate(ranked(heads, siblings)):
        waiting: list[tuple[list[int], int]] = [([LAST + row], 0)]
        paths = 0
        while waiting:
            path, candidate = waiting.pop()
            depth = len(path) - 1
            if depth == DEPTHS:
                continue
            order, confidences = found.children(depth, candidate)
            if not order:  # not among the parents of this depth
                continue
            paths += 1
            wanted, tokens = published(tensors, target, STATES[row], path).softmax(-1).topk(siblings)
            assert [found.tokens[depth][one] for one in order] == tokens.tolist()
            torch.testing.assert_close(torch.tensor(confidences), wanted, rtol=1e-4, atol=1e-5)
            waiting += [([*path, found.tokens[depth][one]], one) for one in order]
        assert paths == 1 + 2 * min(siblings, 4)


def test_sampled_chains_are_drawn_with_the_shared_noise(target: Path, tmp_path: Path) -> None:
    tensors = public_drafts.hydra()
    heads = served(public_drafts.write(tmp_path, HYDRA, tensors), target)
    chains = set()
    for seed in range(4):
        path = [LAST]
        for depth in range(DEPTHS):
            noise = gumbel([seed], [KNOWN + depth], 0, VOCABULARY, torch.device("cpu"))[0]
            path.append(int((published(tensors, target, STATES[0], path) / 1.5 + noise).argmax()))

        found = ranked(heads, 1, SamplingParameters(temperature=1.5, seed=seed))[0]

        assert [level[0] for level in found.tokens] == path[1:]
        chains.add(tuple(path))
    assert len(chains) > 1


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_in_few_bits_keep_a_state_that_is_larger_than_embeddings(
    weights: Weights, target: Path, tmp_path: Path
) -> None:
    """The columns of a large state have small weights, which are zeros in one scale with those of the embedding."""
    tensors, states = public_drafts.hydra(), public_drafts.Draw(18).matrix(9, HIDDEN)
    for name, tensor in tensors.items():
        if name.startswith("hydra_mlp.0.0.") and name.endswith("weight"):
            tensor[:, :HIDDEN] /= 300
    draft = public_drafts.write(tmp_path, HYDRA, tensors)
    inputs = torch.cat([300 * states, public_drafts.Draw(19).matrix(9, HIDDEN)], dim=1)
    wanted = served(draft, target).logits(0, inputs)

    found = served(draft, target, weights).logits(0, inputs)

    assert (found - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hydra_head_arch": "prefix-mlp"},
            r"hydra_head_arch in config.json: 'prefix-mlp' is refused; its heads read a decoder layer over the whole "
            r"text \(prefix_embeding_layer\); it must be 'mlp'",
        ),
        (
            {"hydra_head_arch": "cross-attn"},
            "hydra_head_arch in config.json: 'cross-attn' is refused; its heads attend to the whole text; it must be",
        ),
        (
            {"hydra_head_arch": "eagle-attn"},
            "hydra_head_arch in config.json: 'eagle-attn' is refused; its heads attend",
        ),
        ({"hydra_head_arch": "mlp2"}, "hydra_head_arch in config.json: 'mlp2' is refused; it must be 'mlp'"),
        ({"grounded_heads": False}, "grounded_heads in config.json: False is refused; it must be true"),
        ({"hidden_state_offset": 1}, "hidden_state_offset in config.json: 1 is refused; it must be 0"),
    ],
)
def test_settings(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    public_drafts.write(tmp_path, HYDRA | changes, public_drafts.hydra())
    with pytest.raises(ModelLoadError, match=message):
        read_draft(tmp_path)


def test_tensors_in_excess(tmp_path: Path) -> None:
    strange = {"prefix_embeding_layer.norm.weight": torch.ones(HIDDEN)}
    public_drafts.write(tmp_path, HYDRA, public_drafts.hydra() | strange)
    with pytest.raises(ModelLoadError, match="prefix_embeding_layer"):
        read_draft(tmp_path)


def test_a_head_with_a_number_beyond_all_others(tmp_path: Path) -> None:
    far = {"hydra_mlp.1000000000.0.linear.weight": torch.ones(1, 1)}
    public_drafts.write(tmp_path, HYDRA, public_drafts.hydra() | far)
    with pytest.raises(ModelLoadError, match=r"hydra_mlp\.1000000000\.0\.linear"):
        read_draft(tmp_path)


def test_an_output_head_that_is_no_matrix(tmp_path: Path) -> None:
    public_drafts.write(tmp_path, HYDRA, public_drafts.hydra() | {"hydra_lm_head.0.weight": torch.ones(4)})
    with pytest.raises(ModelLoadError, match=r"lack the matrix hydra_lm_head\.0\.weight"):
        read_draft(tmp_path)


@pytest.mark.parametrize("weights", ["int8", "int4", "bfloat16"])
def test_small_weights_rank_nearly_the_same_tokens(weights: Any, target: Path, tmp_path: Path) -> None:
    draft = public_drafts.write(tmp_path, HYDRA, public_drafts.hydra())
    settings = ModuleSettings(path=str(draft), weights=weights)
    loaded = load_served_module(settings, TargetSection(path=str(target), device="cpu"), "heads", (PublicModule,))
    exact, small = ranked(served(draft, target), 3)[0], ranked(HydraHeads(loaded.module, loaded), 3)[0]
    assert len(set(exact.tokens[0]) & set(small.tokens[0])) >= 2
