"""Candidates of all depths are ranked as the target decides, and a selector ranks them below each candidate before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.request import SamplingParameters
from tests.support.models import drafting_modules, tiny
from tests.support.models.drafting_modules import selected
from workers.draft.common.modules.module_settings import ModuleSettings
from workers.draft.common.modules.served_module import load_served_module
from workers.draft.heads.heads_drafter import ParallelHeads
from workers.model.draft_shapes import HeadsShape
from workers.model.drafting.files import Drafter, load_drafter
from workers.model.drafting.heads import MedusaHeads
from workers.model.drafting.selector import top_candidates
from workers.sampling.candidates import candidates
from workers.sampling.context import DecisionContext

DEPTHS = 3
TOKENS = (5, 9, 17, 30)
SAMPLINGS = [
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.9, seed=3),
    SamplingParameters(temperature=0.7, top_p=0.8, seed=4),
    SamplingParameters(temperature=1.0, top_k=5, seed=5),
    SamplingParameters(temperature=1.0, min_p=0.1, seed=6),
    SamplingParameters(temperature=0.0, repetition_penalty=1.5),
    SamplingParameters(temperature=0.0, end_token_ids=(2, 7), min_tokens=50),
]


def served_heads(settings: ModuleSettings, target: TargetSection) -> ParallelHeads:
    loaded = load_served_module(settings, target, "heads", (MedusaHeads,))
    return ParallelHeads(loaded.module, loaded)


def heads_in(
    target: Path, directory: Path, selector_rank: int, vocabulary: range | None
) -> tuple[ParallelHeads, Drafter, MedusaHeads]:
    shape = HeadsShape(DEPTHS, mix_rank=16, selector_rank=selector_rank)
    drafting_modules.save(target, directory, "heads", (2,), vocabulary, shape=shape)
    section = TargetSection(path=str(target), device="cpu")
    served = served_heads(ModuleSettings(path=str(directory), weights="float32"), section)
    drafter = load_drafter(directory, target, torch.float32, torch.device("cpu"))
    assert isinstance(drafter.module, MedusaHeads)
    return served, drafter, drafter.module


def contexts_of(sampling: SamplingParameters) -> list[DecisionContext]:
    return [DecisionContext(sampling, (*TOKENS, *(-1 for _ in range(depth))), 2) for depth in range(DEPTHS)]


@pytest.mark.parametrize("vocabulary", [None, range(0, tiny.VOCABULARY, 2)], ids=["whole", "reduced"])
def test_without_a_selector_every_depth_is_ranked_like_a_draft_model(
    vocabulary: range | None, target: Path, tmp_path: Path
) -> None:
    served, drafter, module = heads_in(target, tmp_path, 0, vocabulary)
    taps = torch.randn(len(SAMPLINGS), 48).bfloat16()
    contexts = [context for sampling in SAMPLINGS for context in contexts_of(sampling)]
    ranked = served.rank(list(taps), [TOKENS[-1]] * len(taps), contexts, 4)
    last = drafter.ends.embed(torch.tensor([TOKENS[-1]] * len(taps)))
    logits = drafter.ends.logits(module(drafter.ends.normalised(taps), last)).flatten(0, 1)
    wanted = candidates(logits, contexts, 4, drafter.ends.vocabulary)
    for row, paths in enumerate(ranked):
        for depth in range(DEPTHS):
            order, confidences = paths.children(depth, 3)
            found = [
                (paths.tokens[depth][one], confidence)
                for one, confidence in zip(order, confidences, strict=True)
                if confidence > 0
            ]
            best = wanted[row * DEPTHS + depth]
            assert [token for token, _ in found] == [candidate.token for candidate in best]
            assert [confidence for _, confidence in found] == pytest.approx(
                [candidate.probability for candidate in best], rel=1e-3
            )


def test_a_selector_ranks_the_candidates_below_each_candidate_before(target: Path, tmp_path: Path) -> None:
    served, drafter, module = heads_in(target, tmp_path, 8, range(0, tiny.VOCABULARY, 2))
    tap = torch.randn(48).bfloat16()
    (paths,) = served.rank([tap], [TOKENS[-1]], contexts_of(SAMPLINGS[0]), 16)
    ends, selector = drafter.ends, module.selector
    assert selector is not None
    hidden = module(ends.normalised(tap), ends.embed(torch.tensor(TOKENS[-1])))
    orders = set()
    for depth in range(1, DEPTHS):
        rows, plain = top_candidates(ends, hidden[depth])
        assert [int(token) for token in ends.tokens_of(rows)] == list(paths.tokens[depth])
        for parent, token in enumerate(paths.tokens[depth - 1]):
            previous = ends.embed(torch.tensor(token))
            wanted = selected(selector, ends, hidden[depth], previous, rows, plain).exp()
            order, confidences = paths.children(depth, parent)
            assert list(order) == wanted.argsort(descending=True).tolist()
            assert list(confidences) == pytest.approx(wanted.sort(descending=True).values.tolist(), rel=1e-3)
            orders.add(tuple(order))
    assert len(orders) > 2


@pytest.mark.parametrize("weights", ["auto", "bfloat16", "int8", "int4"])
def test_reduced_weights_change_confidences_only_a_little(weights: str, target: Path, tmp_path: Path) -> None:
    served, _, _ = heads_in(target, tmp_path, 8, None)
    section = TargetSection(path=str(target), device="cpu")
    reduced = served_heads(ModuleSettings.model_validate({"path": str(tmp_path), "weights": weights}), section)
    tap = torch.randn(48, generator=torch.Generator().manual_seed(1)).bfloat16()
    (exact,), (rounded,) = (
        heads.rank([tap], [TOKENS[-1]], contexts_of(SAMPLINGS[0]), 4) for heads in (served, reduced)
    )
    assert rounded.tokens[0][0] == exact.tokens[0][0]
    assert rounded.confidences[0][0] == pytest.approx(exact.confidences[0][0], abs=0.1)


def test_under_a_rule_without_shared_noise_the_most_probable_tokens_are_ranked_first(
    target: Path, tmp_path: Path
) -> None:
    heads_in(target, tmp_path, 0, None)
    section = TargetSection(path=str(target), device="cpu", acceptance="rejection")
    served = served_heads(ModuleSettings(path=str(tmp_path), weights="float32"), section)
    tap = torch.randn(48).bfloat16()
    rankings = [
        served.rank([tap], [TOKENS[-1]], contexts_of(SamplingParameters(temperature=temperature, seed=8)), 4)[0]
        for temperature in (0.0, 1.0)
    ]
    assert rankings[0].tokens[0][:4] == rankings[1].tokens[0][:4]
