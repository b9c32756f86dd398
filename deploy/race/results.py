"""The results of a race as values, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.race.answers import RacePass
from deploy.race.competitors import Skipped
from deploy.race.exactness import Exactness

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of task, batch and temperature."""

    task: str
    batch: int
    temperature: float

    def __str__(self) -> str:
        """For messages."""
        return f"{self.task}, batch {self.batch}, temperature {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a competitor holds and computes."""

    target_bytes: int = 0
    """Bytes of the target's weights."""
    draft_bytes: int = 0
    """Bytes of the drafter's own weights; 0 without a model."""
    resident_bytes: int = 0
    """By how much the memory of the process grew when the competitor started, its KV pool included."""
    target_flops: float = 0.0
    """Floating-point operations of the target's matrices for one token."""
    draft_flops: float = 0.0
    """The same of the draft model."""
    devices: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A competitor in the results."""

    name: str
    kind: str
    """`cluster`, `peer` or `endpoint`."""
    assignments: tuple[str, ...]
    cost: Cost
    is_plain_own: bool = False
    """Whether plain decoding was measured in the competitor's own cluster, with speculation off in the request."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """The passes of one competitor in one cell. Plain decoding runs before its passes, between them and after them."""

    competitor: str
    cell: Cell
    plain: tuple[RacePass, ...]
    passes: tuple[RacePass, ...]
    exactness: Exactness
    skipped: str = ""
    """Why the competitor did not run in this cell."""

    @property
    def is_lossless(self) -> bool:
        """Whether no answer was reported as lossy."""
        return all(answer.is_lossless for found in self.passes for answer in found.answers)


@dataclass(slots=True)
class RaceResults:
    """All that a race measured. It grows while the race runs."""

    title: str
    """The target, its dtype and the prompts, in one line."""
    machine: dict[str, Any]
    command: str
    stretch: str = ""
    """What was done to the target's size without changing its function; empty for a model as it is."""
    entries: list[Entry] = field(default_factory=list)
    cells: list[CellResult] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def of(
        self, competitor: str, *, task: str | None = None, batch: int | None = None, temperature: float | None = None
    ) -> list[CellResult]:
        """The measured cells of a competitor, narrowed by what is given."""
        return [
            result
            for result in self.cells
            if result.competitor == competitor
            and result.passes
            and task in (None, result.cell.task)
            and batch in (None, result.cell.batch)
            and temperature in (None, result.cell.temperature)
        ]

    def to_json(self) -> str:
        """All raw figures as JSON."""
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, ensure_ascii=False)


def over_tasks(results: Sequence[CellResult]) -> tuple[list[RacePass], list[RacePass]]:
    """The plain passes and own passes of several tasks joined: the i-th pass of every task becomes one pass."""
    return _joined([result.plain for result in results]), _joined([result.passes for result in results])


def plain_passes(results: RaceResults, batch: int, temperature: float) -> list[RacePass]:
    """The plain passes around all competitors, each over all tasks."""
    found = [results.of(entry.name, batch=batch, temperature=temperature) for entry in results.entries]
    return [plain for cells in found for plain in over_tasks(cells)[0]]


def _joined(passes: Sequence[Sequence[RacePass]]) -> list[RacePass]:
    joined: list[RacePass] = []
    for row in zip(*passes, strict=False):
        names = {name for found in row for name in found.counters}
        joined.append(
            RacePass(
                tuple(answer for found in row for answer in found.answers),
                sum(found.seconds for found in row),
                {name: sum(found.counters.get(name, 0.0) for found in row) for name in sorted(names)},
            )
        )
    return joined


def write_results(results: RaceResults, directory: Path) -> None:
    """Write `race.json` into the directory, replacing an earlier one at once."""
    directory.mkdir(parents=True, exist_ok=True)
    building = directory / "race.json.part"
    building.write_text(results.to_json(), encoding="utf-8")
    building.replace(directory / "race.json")
