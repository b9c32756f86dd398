"""All that one evaluation found: measurements, quality and the limits of the device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from deploy.bench.contestants.answers import BenchAnswer, BenchPass
from deploy.bench.evaluation.tasks.metrics import chrf
from deploy.bench.evaluation.tasks.task import Scores, Task
from deploy.bench.measuring.results import PLAIN, BenchResults, Cell, CellResult, Cost, Entry, over_tasks
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


NO_DRAFTS = "draft.method=none"

Decode = Callable[[Sequence[int]], str]
"""The text of tokens, without special tokens."""


@dataclass(frozen=True, slots=True)
class Quality:
    """The answers of one competitor to one task."""

    competitor: str
    cell: Cell
    scores: Scores
    answers: int
    differing: int | None = None
    """Answers that differ from those of plain decoding; `None` where they are not compared."""
    chrf_to_plain: float | None = None
    """chrF of the answers with those of plain decoding as the references, 0 to 100."""
    differing_from_same_target: int | None = None
    """Answers that differ from those of the same target without drafts, where that is a competitor as well."""
    tokens: float = 0.0
    """Mean number of tokens in an answer."""
    at_limit: int = 0
    """Answers that were cut at the maximum number of tokens."""


@dataclass(slots=True)
class Scoreboard:
    """Scores answers once, as results come in."""

    tasks: Mapping[str, Task]
    decode: Decode | None = None
    """For answers without a text."""
    found: dict[tuple[str, Cell], Quality] = field(default_factory=dict)

    def update(self, results: BenchResults) -> None:
        """Score what is new in the results."""
        for entry, result in _measured(results):
            if result.plain:
                self._add(plain_name(entry), result.cell, result.plain[0].answers)
            plain = result.plain[0].answers if result.plain else None
            answers = result.passes[0].answers
            self._add(entry.name, result.cell, answers, plain if _compares(entry, result) else None, plain)
            same = self._same_target(results, entry, result.cell)
            if same is not None:  # it may come after the methods on the same target
                key = (entry.name, result.cell)
                differing = self._differing(answers, same)
                self.found[key] = replace(self.found[key], differing_from_same_target=differing)

    def of(self, competitor: str, cell: Cell) -> Quality | None:
        """The quality of a competitor's answers in a cell; `None` if it did not run."""
        return self.found.get((competitor, cell))

    def to_list(self) -> list[dict[str, object]]:
        """All figures, for JSON."""
        return [asdict(quality) for quality in self.found.values()]

    def _add(
        self,
        name: str,
        cell: Cell,
        answers: Sequence[BenchAnswer],
        compared: Sequence[BenchAnswer] | None = None,
        plain: Sequence[BenchAnswer] | None = None,
    ) -> None:
        """Score answers. Those that differ from `compared` are counted, and chrF is that with `plain`."""
        if (name, cell) in self.found:
            return
        task = self.tasks[cell.task]
        texts = [self._text(answer) for answer in answers]
        self.found[name, cell] = Quality(
            name,
            cell,
            task.score(task.examples, texts),
            len(answers),
            differing=None if compared is None else self._differing(answers, compared),
            chrf_to_plain=None if plain is None else chrf(texts, [self._text(answer) for answer in plain]),
            tokens=sum(answer.completion_tokens for answer in answers) / max(1, len(answers)),
            at_limit=sum(answer.completion_tokens >= task.max_tokens for answer in answers),
        )

    def _text(self, answer: BenchAnswer) -> str:
        return answer.text if answer.text or self.decode is None else self.decode(answer.tokens)

    def _differing(self, answers: Sequence[BenchAnswer], others: Sequence[BenchAnswer]) -> int:
        return sum(
            one.tokens != other.tokens
            if one.tokens and other.tokens
            else self._text(one).strip() != self._text(other).strip()
            for one, other in zip(answers, others, strict=True)
        )

    def _same_target(self, results: BenchResults, entry: Entry, cell: Cell) -> Sequence[BenchAnswer] | None:
        """The answers of the competitor that changes the target as `entry` does and drafts nothing."""
        if not entry.alters_target or NO_DRAFTS in entry.assignments:
            return None
        wanted = _beyond_drafts(entry)
        for other in results.entries:
            if NO_DRAFTS in other.assignments and _beyond_drafts(other) == wanted:
                found = results.of(other.name, task=cell.task, batch=cell.batch, temperature=cell.temperature)
                if found:
                    return found[0].passes[0].answers
        return None


def plain_name(entry: Entry) -> str:
    """The name of the plain passes around a competitor."""
    return ", ".join(filter(None, (PLAIN, entry.baseline)))


def _measured(results: BenchResults) -> Iterator[tuple[Entry, CellResult]]:
    entries = {entry.name: entry for entry in results.entries}
    for result in results.cells:
        if result.passes:
            yield entries[result.competitor], result


def _compares(entry: Entry, result: CellResult) -> bool:
    """Whether an answer that differs from plain decoding's means something: samples of other noise differ anyway."""
    return result.cell.temperature == 0 or entry.kind == "cluster"


def _beyond_drafts(entry: Entry) -> tuple[str, ...]:
    return tuple(sorted(text for text in entry.assignments if not text.startswith("draft.")))
