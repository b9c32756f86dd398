"""Modules that a public format describes are stored in it and draft the same tokens; others say what keeps them out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ModelLoadError
from cluster.core.request import SamplingParameters
from tests.support.models import drafting_modules, public_drafts, tiny
from tests.support.models.draft_references import norm
from workers.draft.common.modules.module_settings import ModuleSettings
from workers.draft.common.modules.ranked_paths import RankedPaths
from workers.draft.common.modules.served_module import load_served_module
from workers.draft.heads.heads_drafter import ParallelHeads
from workers.draft.heads.own_heads import OwnHeads
from workers.model.draft_card import WEIGHTS, is_distilled
from workers.model.draft_shapes import HeadsShape
from workers.model.drafting.files import load_drafter, read_trained, save_drafter, save_own, stored_tensors
from workers.model.drafting.heads import MedusaHeads
from workers.model.drafting.public import PublicModule
from workers.model.drafting.public_form import obstacle
from workers.sampling.context import DecisionContext

CPU = torch.device("cpu")
LAYERS, DEPTHS, HIDDEN = 2, 3, 48
PLAIN = HeadsShape(DEPTHS, mix_rank=0, selector_rank=0)
REDUCED = range(0, tiny.VOCABULARY, 2)
SAMPLED = SamplingParameters(temperature=0.9, seed=4)
STATES = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose weights bfloat16 holds exactly."""
    directory = tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=LAYERS))
    weights = load_file(directory / "model.safetensors")
    rounded = {name: value.bfloat16().float() for name, value in weights.items()}
    save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def ranked(draft: Path, target: Path, kind: type[MedusaHeads | PublicModule]) -> list[RankedPaths]:
    """The candidates of four rows, two of them sampled."""
    settings = ModuleSettings(path=str(draft), weights="float32")
    loaded = load_served_module(settings, TargetSection(path=str(target), device="cpu"), "heads", (kind,))
    module = loaded.module
    heads = ParallelHeads(module, loaded) if isinstance(module, MedusaHeads) else OwnHeads(module, loaded)
    contexts = [
        DecisionContext(sampling, (0,) * (5 + depth), 1)
        for sampling in (SamplingParameters(temperature=0.0), SAMPLED) * 2
        for depth in range(DEPTHS)
    ]
    return heads.rank(list(STATES), [0] * 4, contexts, 4)


@pytest.mark.parametrize("vocabulary", [None, REDUCED])
def test_plain_heads_are_stored_as_medusa_and_rank_the_same_candidates(
    vocabulary: range | None, target: Path, tmp_path: Path
) -> None:
    tree = ((0,), (1,), (0, 0))
    public, own = tmp_path / "public", tmp_path / "own"
    module = drafting_modules.save(target, public, "heads", (LAYERS,), vocabulary, shape=PLAIN)
    size = None if vocabulary is None else len(vocabulary)
    card = replace(drafting_modules.card_for(target, "heads", (LAYERS,), size, PLAIN), tree=tree)
    tokens = None if vocabulary is None else torch.tensor(vocabulary)
    save_drafter(public, card, module, tokens, target_directory=target)
    own.mkdir()
    save_own(own, card, module, tokens, int8=False)

    assert {file.name for file in public.iterdir()} == {"config.json", WEIGHTS}
    loaded = load_drafter(public, target, torch.float32, CPU, "heads").card
    assert (loaded.tree, loaded.vocabulary_size, loaded.target) == (tree, size, target.name)
    for mine, wanted in zip(ranked(public, target, PublicModule), ranked(own, target, MedusaHeads), strict=True):
        assert (mine.tokens, mine.order) == (wanted.tokens, wanted.order)
        torch.testing.assert_close(torch.tensor(mine.confidences[1:]), torch.tensor(wanted.confidences[1:]))


def test_what_is_stored_means_what_medusa_publishes(target: Path, tmp_path: Path) -> None:
    """`norm` of the state, `x + SiLU(W x)` for each depth, and one output head with the tokens of its rows."""
    module = drafting_modules.save(target, tmp_path, "heads", (LAYERS,), REDUCED, shape=PLAIN)
    stored, config = load_file(tmp_path / WEIGHTS), json.loads((tmp_path / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    final = norm(STATES, weights["model.norm.weight"], 1e-6)

    wanted = torch.stack(
        [
            (final + torch.nn.functional.silu(final @ stored[f"blocks.{depth}.layers.0.weight"].float().T))
            @ stored["lm_heads.0.weight"].float().T
            for depth in range(DEPTHS)
        ],
        dim=1,
    )

    assert isinstance(module, MedusaHeads)
    module.to(torch.bfloat16).to(torch.float32)
    head = weights["lm_head.weight"][list(REDUCED)].bfloat16().float()
    torch.testing.assert_close(module(final, final) @ head.T, wanted, rtol=1e-5, atol=1e-5)
    assert stored["token_map"].tolist() == list(REDUCED)
    assert (config["num_heads"], config["truncated_vocab_size"], config["original_lm_head"]) == (
        DEPTHS,
        len(REDUCED),
        True,
    )


def test_heads_in_medusas_format_are_trained_further(target: Path, tmp_path: Path) -> None:
    module = drafting_modules.save(target, tmp_path, "heads", (LAYERS,), REDUCED, shape=PLAIN)

    card = read_trained(tmp_path, target)

    assert (card.shape, card.taps, card.vocabulary_size) == (PLAIN, (LAYERS,), len(REDUCED))
    (stored,) = stored_tensors(tmp_path).values()
    assert torch.equal(stored, module.state_dict()["weights"].bfloat16())


def test_other_public_drafts_are_not_trained_further(target: Path, tmp_path: Path) -> None:
    public_drafts.write(tmp_path / "medusa", {}, public_drafts.medusa())
    config = public_drafts.speculators_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    public_drafts.write(tmp_path / "eagle3", config, public_drafts.eagle3("layers.0."))

    for name, kind in (("medusa", "heads"), ("eagle3", "eagle")):
        lacks = f"draft of kind '{kind}' in a public format: only heads .* an EAGLE-3 head needs --kind eagle3"
        with pytest.raises(ModelLoadError, match=lacks):
            read_trained(tmp_path / name, target)


@pytest.mark.parametrize(
    ("kind", "shape", "taps", "int8", "clause"),
    [
        ("heads", PLAIN, (LAYERS,), False, ""),
        ("heads", PLAIN, (LAYERS,), True, "its matrices are int8"),
        ("heads", PLAIN, (1,), False, "it reads another hidden state than the target's last one"),
        ("heads", replace(PLAIN, mix_rank=8), (LAYERS,), False, "a layer adds the last token to the hidden state"),
        ("heads", replace(PLAIN, selector_rank=8), (LAYERS,), False, "a selector ranks the candidates"),
        ("eagle", None, (1, 2), False, "the residual stream begins as a projection of embedding and fused hidden"),
        ("block", None, (1, 2), False, "each slot adds a learned vector"),
        ("table", None, (), False, "it is a table"),
    ],
)
def test_what_keeps_a_module_out_of_public_formats(
    kind: str, shape: HeadsShape | None, taps: tuple[int, ...], int8: bool, clause: str, target: Path, tmp_path: Path
) -> None:
    drafting_modules.save(target, tmp_path, kind, taps, shape=shape, int8=int8)

    found = obstacle(drafting_modules.card_for(target, kind, taps, shape=shape), target, int8=int8)

    assert found.startswith(clause) and bool(found) == bool(clause)
    assert is_distilled(tmp_path) == bool(clause)
