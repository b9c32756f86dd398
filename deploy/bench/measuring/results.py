"""The results of a benchmark as values, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.bench.contestants.answers import BenchPass, ResourceUse
from deploy.bench.measuring.competitors import Skipped

FORMAT_VERSION = 1
PLAIN = "plain"
"""The name of plain decoding in tables and plots."""


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
class Exactness:
    """Number of answers by how they compare with plain decoding."""

    equal: int = 0
    explained: int = 0
    """Answers that differ first where the target's logits of both tokens are closer than rounding may change them."""
    wrong: int = 0
    not_compared: int = 0
    """Answers that come from other random numbers, or of which a side has no token ids."""
    largest_gap: float = 0.0
    """Largest difference of logits among the explained and the wrong answers, where it is known."""

    def __add__(self, other: Exactness) -> Exactness:
        return Exactness(
            self.equal + other.equal,
            self.explained + other.explained,
            self.wrong + other.wrong,
            self.not_compared + other.not_compared,
            max(self.largest_gap, other.largest_gap),
        )

    def __str__(self) -> str:
        """`equal / explained / wrong`, and how many answers are not compared."""
        counts = f"{self.equal} / {self.explained} / {self.wrong}"
        return f"{counts} ({self.not_compared} not compared)" if self.not_compared else counts


@dataclass(frozen=True, slots=True)
class KvLayer:
    """The stored keys and values of one decoder layer."""

    token_bytes: int
    """Bytes for one token."""
    window: int | None = None
    """Number of tokens that a new token reads at most; `None`: all."""


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
    """Floating-point operations for one proposed token, of a drafter whose passes draft one token each."""
    draft_step_flops: float = 0.0
    """Floating-point operations of one pass, of a drafter whose pass drafts all depths."""
    draft_committed_flops: float = 0.0
    """Floating-point operations of a drafter for the hidden states of one committed token."""
    devices: int = 1
    sequences: int = 1
    """Sequences that an answer runs at a time: its beams."""
    read_bytes: int = 0
    """Bytes of the target's weights that one step reads: all but those of an encoder."""
    kv_layers: tuple[KvLayer, ...] = ()
    """The target's keys and values, layer by layer; empty where they are unknown."""


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
    baseline: str = ""
    """How the requests of its plain passes differ from those of other competitors; empty: they do not."""
    alters_target: bool = False
    """Whether it changes settings beyond drafting, so that its answers may differ from those of plain decoding."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """The passes of one competitor in one cell. Plain decoding runs before its passes, between them and after them."""

    competitor: str
    cell: Cell
    plain: tuple[BenchPass, ...]
    passes: tuple[BenchPass, ...]
    exactness: Exactness
    skipped: str = ""
    """Why the competitor did not run in this cell."""

    @property
    def is_lossless(self) -> bool:
        """Whether no answer was reported as lossy."""
        return all(answer.is_lossless for found in self.passes for answer in found.answers)


@dataclass(slots=True)
class BenchResults:
    """All that was measured. It grows while the benchmark runs."""

    title: str
    """The target, its dtype and the prompts, in one line."""
    machine: dict[str, Any]
    command: str
    stretch: str = ""
    """What was done to the target's size without changing its function; empty for a model as it is."""
    entries: list[Entry] = field(default_factory=list)
    cells: list[CellResult] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    plain_cost: Cost = Cost()
    """The cost of plain decoding."""

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


def over_tasks(results: Sequence[CellResult]) -> tuple[list[BenchPass], list[BenchPass]]:
    """The plain passes and own passes of several tasks joined: the i-th pass of every task becomes one pass."""
    return _joined([result.plain for result in results]), _joined([result.passes for result in results])


def plain_passes(results: BenchResults, batch: int, temperature: float) -> list[BenchPass]:
    """The plain passes around all competitors without request options of their own, each over all tasks."""
    found = [
        results.of(entry.name, batch=batch, temperature=temperature) for entry in results.entries if not entry.baseline
    ]
    return [plain for cells in found for plain in over_tasks(cells)[0]]


def _joined(passes: Sequence[Sequence[BenchPass]]) -> list[BenchPass]:
    joined: list[BenchPass] = []
    for row in zip(*passes, strict=False):
        names = {name for found in row for name in found.counters}
        joined.append(
            BenchPass(
                tuple(answer for found in row for answer in found.answers),
                sum(found.seconds for found in row),
                {name: sum(found.counters.get(name, 0.0) for found in row) for name in sorted(names)},
                joined_use([found.resources for found in row]),
            )
        )
    return joined


def joined_use(uses: Sequence[ResourceUse]) -> ResourceUse:
    """Times and energy added up, and the largest peak of each process. A sum with an unknown part is unknown."""
    peaks: dict[str, int] = {}
    for use in uses:
        for name, most in use.peak_bytes.items():
            peaks[name] = max(most, peaks.get(name, 0))
    return ResourceUse(sum_of([use.cpu_seconds for use in uses]), peaks, sum_of([use.joules for use in uses]))


def sum_of(values: Sequence[float | None]) -> float | None:
    """The sum; `None` without values, or if one is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def write_json(text: str, file: Path) -> None:
    """Write results, replacing an earlier file at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    building = file.with_name(f"{file.name}.part")
    building.write_text(text, encoding="utf-8")
    building.replace(file)
