"""Memory and predicted speed of trainings for large targets, as `pilotfish distill --plan` counts them.

    python -m tests.bench.training_plans --results tests/bench/results/training-plans.json

Nothing is trained, and no weights are needed: the tables follow from the targets' configurations.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.distillation.recipe import read_recipe
from deploy.distillation.training_plan import plan_headings, plan_rows, plans_for
from deploy.simulation.device.models import MODELS
from tests.bench.report import heading, keep, table
from workers.distill.options import DistillOptions

COMMAND = "python -m tests.bench.training_plans"
"""Prints what `pilotfish distill --plan --recipe dspark|eagle3 --max-length 2048 --batch-tokens 16384` prints."""
RECIPES, RANKS = ("dspark", "eagle3"), {"Llama-3.1-8B": 1, "Llama-3.3-70B": 8}
"""The recipes, and the ranks of the engine that have each target."""


@dataclass(frozen=True, slots=True)
class PlanTable:
    """The plan of one training."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plan_tables() -> Iterator[PlanTable]:
    """The plans of all recipes for all targets."""
    for model, ranks in RANKS.items():
        for recipe in RECIPES:
            values = {**read_recipe(recipe), "max_length": 2048, "batch_tokens": 16384}
            options = DistillOptions(plan=True, recipe=recipe, **values)
            with tempfile.TemporaryDirectory() as directory:
                MODELS[model].save_pretrained(directory)
                training, planned = plans_for(options, Path(directory), ranks)
            columns = (one.replace("-\n", "").replace("\n", " ") for one in plan_headings(training, options.device_gb))
            name = f"{training.name} of {training.size.parameters / 1e6:,.0f} M parameters"
            title = f"{name} for {model}, GB of each device"
            yield PlanTable(title, tuple(columns), tuple(plan_rows(training, planned)))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.training_plans", description=__doc__)
    parser.add_argument("--results", type=Path, help="file for the tables, as in tests/bench/results")
    options = parser.parse_args()
    for one in plan_tables():
        heading(one.title)
        table(one.columns, one.rows)
    if options.results is not None:
        keep(options.results, "predicted, H100", COMMAND)


if __name__ == "__main__":
    main()
