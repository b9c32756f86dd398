"""Computation by drafters counts once a step or once a token, and never without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.bench.contestants.answers import BenchAnswer, BenchPass
from deploy.bench.measuring import measures
from deploy.bench.measuring.costs import DraftFlops, configuration_cost, count_draft_flops
from deploy.bench.measuring.results import Cost
from deploy.settings import load_settings
from tests.support.models import public_drafts, tiny
from workers.model.weight_counts import count_weights


def test_passes_over_all_depths_count_once_a_step_and_never_without_drafts() -> None:
    cost = Cost(draft_flops=1.0, draft_step_flops=100.0, draft_committed_flops=1000.0)
    answer = BenchAnswer(tuple(range(8)), (), 8, 5, 4, True)
    assert measures.draft_flops(cost, [BenchPass((answer,), 1.0, {"proposed_tokens": 12.0})]) == 12 + 400 + 8000
    assert measures.draft_flops(cost, [BenchPass((answer,), 1.0, {"proposed_tokens": 3.0})]) == 3 + 300 + 8000
    assert measures.draft_flops(cost, [BenchPass((answer,), 1.0, {})]) == 0.0


def test_a_public_block_drafter_computes_its_layers_for_each_slot_and_its_context_once(tmp_path: Path) -> None:
    """The bias of a Markov head and the confidence are computed below four candidates of each depth but the first."""
    public_drafts.write(tmp_path, public_drafts.DSPARK, public_drafts.spark())
    configuration = load_settings("cpu", [f"draft.path={tmp_path}"], {}).configuration
    layers = 2 * (2 * 48 * 48 + 2 * 24 * 48 + 3 * 64 * 48)
    context, heads, output = 48 * 3 * 48 + 2 * 2 * 24 * 48, 96 * 8 + 48 + 8, 96 * 48

    found = count_draft_flops(configuration)

    assert found == DraftFlops(0.0, 2.0 * (4 * layers + 4 * output + 13 * heads), 2.0 * context)


@pytest.mark.parametrize(("weights", "bits"), [("float32", 32), ("bfloat16", 16), ("int8", 8), ("int4", 5)])
def test_weights_of_a_module_have_the_bytes_of_its_own_type(weights: str, bits: int, tmp_path: Path) -> None:
    """Weights of 4 bits have 32 bits more for each group of 32, a scale and a minimum."""
    target = tiny.save(tmp_path / "target", tiny.llama())
    module = public_drafts.write(tmp_path / "draft", public_drafts.DSPARK, public_drafts.spark())
    assignments = [f"target.path={target}", "target.quantization=none", f"draft.path={module}"]
    configuration = load_settings("cpu", [*assignments, f"draft.block.weights={weights}"], {}).configuration
    assert configuration_cost(configuration).draft_bytes == count_weights(module).parameters * bits // 8
