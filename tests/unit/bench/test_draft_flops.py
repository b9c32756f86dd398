"""The arithmetic of drafting: a part of the target's layers, and modules that draft all depths in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.bench.contestants.answers import BenchAnswer, BenchPass
from deploy.bench.measuring import measures
from deploy.bench.measuring.costs import configuration_cost
from deploy.bench.measuring.draft_flops import DraftFlops, count_draft_flops
from deploy.bench.measuring.results import Cost
from tests.support.models import drafting_modules, tiny
from workers.serve.configuration import load_configuration

HIDDEN, KEYS, INNER, TOKENS = 48, 24, 80, tiny.VOCABULARY
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS
"""Multiply-adds of a layer of `tiny.llama`: queries and outputs, keys and values."""
MLP = 3 * HIDDEN * INNER
HEAD = TOKENS * HIDDEN
LAYERS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=LAYERS))


def flops(target: Path, method: str, **settings: Any) -> DraftFlops:
    return count_draft_flops(
        load_configuration({"target": {"path": str(target)}, "draft": {"method": method, method: settings}})
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ATTENTION + MLP + HEAD),  # a third of the layers
        ({"layers": 2}, 2 * (ATTENTION + MLP) + HEAD),
        ({"skip_attention": (0, 2), "skip_mlp": (1,)}, ATTENTION + 2 * MLP + HEAD),
    ],
)
def test_a_drafted_token_goes_through_the_part_of_the_target_that_drafts(
    target: Path, settings: dict[str, Any], expected: int
) -> None:
    assert flops(target, "early_exit", **settings) == DraftFlops(proposed=2.0 * expected)


def test_an_exit_module_computes_its_layers_and_the_head(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path / "exit", "exit", ())
    found = flops(target, "early_exit", path=str(tmp_path / "exit"))
    assert found == DraftFlops(proposed=2.0 * (2 * (ATTENTION + MLP) + HEAD))  # its card names layers 0 and 1


def test_heads_draft_all_depths_in_one_pass(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path / "heads", "heads", (LAYERS,))
    mix, deep, selector = 3 * HIDDEN * 16, 3 * HIDDEN * HIDDEN, 3 * HIDDEN * 8
    found = flops(target, "heads", path=str(tmp_path / "heads"))
    assert found == DraftFlops(step=2.0 * (mix + deep + 3 * (selector + HEAD)))


def test_a_block_is_one_pass_and_reads_each_committed_token_once(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path / "block", "block", (1, 2))
    keys, selector = 2 * 8, 3 * HIDDEN * 8
    layer = 2 * HIDDEN * 32 + 2 * HIDDEN * keys + 3 * HIDDEN * 48
    found = flops(target, "block", path=str(tmp_path / "block"))
    assert found.step == 2.0 * (2 * HIDDEN * HIDDEN + 4 * (2 * layer + selector + HEAD))
    assert found.committed == 2.0 * (2 * HIDDEN * HIDDEN + 2 * 2 * (2 * HIDDEN * keys))
    assert found.proposed == 0.0


def test_other_methods_count_each_proposed_token(target: Path, tmp_path: Path) -> None:
    tiny.save(tmp_path, tiny.llama())
    assert flops(target, "model", path=str(tmp_path)) == DraftFlops(2.0 * (2 * (ATTENTION + MLP) + HEAD))
    assert flops(target, "suffix") == DraftFlops()


def test_a_table_of_successors_computes_nothing(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path / "table", "table", ())
    assert flops(target, "recycling", path=str(tmp_path / "table")) == DraftFlops()


def test_the_cost_of_a_configuration_has_all_of_them(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path / "heads", "heads", (LAYERS,))
    methods = {"methods": ["early_exit", "heads"], "heads": {"path": str(tmp_path / "heads")}}
    cost = configuration_cost(load_configuration({"target": {"path": str(target)}, "draft": methods}))
    assert cost.draft_flops == flops(target, "early_exit").proposed
    assert cost.draft_step_flops == flops(target, "heads", path=str(tmp_path / "heads")).step


def test_passes_over_all_depths_count_once_a_step_and_never_without_drafts() -> None:
    cost = Cost(draft_flops=1.0, draft_step_flops=100.0, draft_committed_flops=1000.0)
    answer = BenchAnswer(tuple(range(8)), (), 8, 5, 4, True)
    assert measures.draft_flops(cost, [BenchPass((answer,), 1.0, {"proposed_tokens": 12.0})]) == 12 + 400 + 8000
    assert measures.draft_flops(cost, [BenchPass((answer,), 1.0, {"proposed_tokens": 3.0})]) == 3 + 300 + 8000
    assert measures.draft_flops(cost, [BenchPass((answer,), 1.0, {})]) == 0.0
