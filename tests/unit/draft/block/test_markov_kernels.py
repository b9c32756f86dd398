"""The CPU kernels rank the slots of blocks with Markov heads as torch does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.core.config.target_section import TargetSection
from cluster.core.request import SamplingParameters
from tests.support.models.shown_target import Shown, shown_target
from tests.unit.draft.block.test_public_blocks import CASES, GREEDY, KNOWN, LAYERS, TOKENS, hidden_vectors, served
from workers.draft.block.markov_ranker import MarkovRanker
from workers.draft.common.modules.module_settings import ModuleSettings
from workers.draft.common.modules.served_module import load_served_module
from workers.model.drafting.public import PublicModule
from workers.sampling.context import DecisionContext


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A target and its hidden states over all tokens but the last."""
    return shown_target(tmp_path_factory.mktemp("target"), LAYERS, TOKENS[:KNOWN])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "markov" in case.reading])
@pytest.mark.parametrize("siblings", [1, 2, 7])
def test_kernels_rank_greedy_and_drawn_rows_as_torch_does(
    name: str, siblings: int, shown: Shown, tmp_path: Path
) -> None:
    """The rows of a call do not change each other."""
    draft = CASES[name].write(tmp_path)
    drafter = served(draft, shown)
    loaded = load_served_module(
        ModuleSettings(path=str(draft), weights="float32"),
        TargetSection(path=str(shown.directory), device="cpu"),
        "block",
        (PublicModule,),
    )
    by_torch = MarkovRanker(loaded.module, loaded.ends, loaded.make, loaded.shortlist)
    ends = (KNOWN, KNOWN - 8, KNOWN - 3)
    hidden = hidden_vectors(drafter, shown, ends)
    samplings = (GREEDY, SamplingParameters(temperature=0.8, seed=5), SamplingParameters(temperature=1.0, seed=6))
    contexts = [
        DecisionContext(sampling, (0,) * (end + 1 + depth), 1)
        for sampling, end in zip(samplings, ends, strict=True)
        for depth in range(hidden.shape[1])
    ]
    arguments = [TOKENS[end] for end in ends], contexts, siblings

    found, expected = (one.rank(hidden, *arguments) for one in (drafter.ranker, by_torch))

    for mine, other in zip(found, expected, strict=True):
        assert mine.tokens == other.tokens
        assert mine.order == other.order
        # Where the first candidate is almost certain, what is left for the others has few digits.
        torch.testing.assert_close(*(flattened(one.confidences) for one in (mine, other)), rtol=1e-3, atol=1e-4)
    assert len({str(one.tokens) for one in found}) == len(ends)


def flattened(confidences: Sequence[Sequence[Sequence[float]]]) -> Tensor:
    return torch.tensor([one for of_depth in confidences for of_parent in of_depth for one in of_parent])
