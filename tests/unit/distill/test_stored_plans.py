"""The plans for large targets in `tests/bench/results` are those that the command counts now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.training_plans import COMMAND, RANKS, RECIPES, PlanTable, plan_tables

STORED = Path(__file__).parents[2] / "bench" / "results" / "training-plans.json"
AGAIN = "run: python -m tests.bench.training_plans --results tests/bench/results/training-plans.json"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def counted() -> tuple[PlanTable, ...]:
    return tuple(plan_tables())


def test_the_stored_tables_are_those_that_the_command_counts(counted: tuple[PlanTable, ...]) -> None:
    stored = json.loads(STORED.read_text("utf-8"))

    assert stored["command"] == COMMAND
    found = [PlanTable(one["title"], tuple(one["columns"]), tuple(map(tuple, one["rows"]))) for one in stored["tables"]]
    assert found == list(counted), AGAIN
    assert len(found) == len(RANKS) * len(RECIPES)


@pytest.mark.parametrize(("model", "devices"), [("Llama-3.1-8B", "1"), ("Llama-3.3-70B", "8")])
def test_a_target_of_8b_is_for_one_device_of_80_gb_and_one_of_70b_for_eight(
    counted: tuple[PlanTable, ...], model: str, devices: str
) -> None:
    """An EAGLE-3 head for the larger one has to compute its activations again."""
    block, head = (one for one in counted if model in one.title)
    fits = [
        [dict(zip(one.columns, cells, strict=True))["fits 80 GB"] for cells in one.rows if cells[0] == devices]
        for one in (block, head)
    ]
    assert fits == [["yes", "yes"], ["yes" if devices == "1" else "no", "yes"]]
