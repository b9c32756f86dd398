"""All that one evaluation found: measurements, quality and the limits of the device."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from deploy.bench.contestants.answers import BenchPass
from deploy.bench.evaluation.quality import PLAIN, Scoreboard, plain_name
from deploy.bench.evaluation.tasks.task import Task
from deploy.bench.measuring.results import BenchResults, CellResult, Cost, Entry, over_tasks
from deploy.bench.measuring.roofs import Roofs


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: a competitor, or the plain passes around it."""

    name: str
    cost: Cost
    cells: tuple[CellResult, ...]
    entry: Entry | None = None
    """`None` for plain passes."""

    @property
    def passes(self) -> list[BenchPass]:
        """The passes of this competitor over all cells, one after another."""
        plain, own = over_tasks(self.cells)
        return plain if self.entry is None else own

    def within(self, task: str) -> Line:
        """This competitor's line with the passes of one task only."""
        return Line(self.name, self.cost, tuple(cell for cell in self.cells if cell.cell.task == task), self.entry)


@dataclass(slots=True)
class Evaluation:
    """Measurements, with the quality of every answer beside them."""

    results: BenchResults
    tasks: tuple[Task, ...]
    quality: Scoreboard
    roofs: Roofs | None = None
    """The limits of the device; `None` for a server elsewhere."""

    @property
    def settings(self) -> list[tuple[int, float]]:
        """The measured combinations of batch and temperature."""
        return list(dict.fromkeys((found.cell.batch, found.cell.temperature) for found in self.results.cells))

    def lines(self, batch: int, temperature: float) -> list[Line]:
        """Plain decoding, then every competitor, each below the plain decoding of its own requests."""
        found: dict[str, Line] = {}
        for entry in self.results.entries:
            cells = tuple(self.results.of(entry.name, batch=batch, temperature=temperature))
            name = plain_name(entry)
            if name not in found and cells and all(cell.plain for cell in cells):
                cost = replace(self.results.plain_cost, sequences=entry.cost.sequences)
                found[name] = Line(name, cost, cells)
            if cells:
                found[entry.name] = Line(entry.name, entry.cost, cells, entry)
        first = [line for line in found.values() if line.name == PLAIN]
        return first + [line for line in found.values() if line.name != PLAIN]

    def to_json(self) -> str:
        """All raw figures, and the quality of every competitor."""
        whole = json.loads(self.results.to_json())
        whole["quality"] = self.quality.to_list()
        whole["tasks"] = {task.name: {"answers": len(task.examples), "notes": task.notes} for task in self.tasks}
        whole["roofs"] = None if self.roofs is None else asdict(self.roofs)
        return json.dumps(whole, ensure_ascii=False)
