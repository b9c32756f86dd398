"""Measures competitors on the same prompts, with plain decoding before and after each of their passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cluster.core.errors import PilotfishError
from deploy.bench.contestants.answers import BenchPass, BenchTasks, PassRequest
from deploy.bench.contestants.endpoint import EndpointContestant
from deploy.bench.contestants.local import LocalContestant
from deploy.bench.measuring.competitors import Skipped
from deploy.bench.measuring.exactness import Gap, Judge, compare
from deploy.bench.measuring.meter import ResourceMeter
from deploy.bench.measuring.results import BenchResults, Cell, CellResult, Entry, Exactness
from deploy.terminal import notices

Report = Callable[[float, str], None]
Save = Callable[[BenchResults], None]


class Contestant(Protocol):
    """The port of everything that answers prompts in a benchmark, and records when each token came.

    A competitor is one entry of the results; its contestant is the running program that answers for it.
    """

    async def answer(self, request: PassRequest) -> BenchPass:
        """Answer all prompts of the request. Raises `PilotfishError`."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often and with which parameters prompts are answered; without more, once, greedily, one at a time."""

    max_tokens: int
    """Maximum number of tokens in one answer, where a task has no bound of its own."""
    batches: tuple[int, ...] = (1,)
    """Numbers of requests in flight."""
    temperatures: tuple[float, ...] = (0.0,)
    """Temperatures; 0 is greedy."""
    repeats: int = 1
    """Repetitions of each measurement."""
    seed: int = 0
    """Seed of the first prompt of a task; the next prompt's is one higher."""


@dataclass(frozen=True, slots=True)
class Started:
    """A competitor that has started."""

    entry: Entry
    contestant: Contestant
    judge: Judge


def plan_cells(tasks: BenchTasks, schedule: Schedule) -> tuple[Cell, ...]:
    """All combinations of batch, temperature and task, in the order in which they run."""
    return tuple(
        Cell(task, batch, temperature)
        for batch in schedule.batches
        for temperature in schedule.temperatures
        for task in tasks
    )


def run_to_the_end(measuring: Coroutine[Any, Any, None], write: Callable[[Path], None], directory: Path) -> None:
    """Run the measurements and write the results into the directory, also those of a benchmark that Ctrl-C stops."""
    try:
        asyncio.run(measuring)
    except KeyboardInterrupt:
        write(directory)
        notices.print(f"stopped; {directory} has what was measured", markup=False)
        raise
    write(directory)


@dataclass(slots=True)
class BenchSession:
    """Measures competitors on the same prompts."""

    schedule: Schedule
    tasks: BenchTasks
    results: BenchResults
    report: Report
    save: Save
    total: int
    """Number of competitors, for the progress."""
    max_tokens: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of tokens in one answer, by task."""
    meter: ResourceMeter | None = None
    """Measures the processes during each pass; `None` measures none."""
    started: int = 0
    passes: int = 0

    @property
    def cells(self) -> tuple[Cell, ...]:
        return plan_cells(self.tasks, self.schedule)

    async def measure(self, started: Sequence[Started], plain: Contestant | None) -> None:
        """Measure competitors in all cells, each in turn between two passes of plain decoding.

        The results are saved after each cell, so that a race that is ended keeps what it has measured.
        """
        self.results.entries.extend(one.entry for one in started)
        cells = self.cells
        for runner in filter(None, (plain, *(one.contestant for one in started))):
            await self._warm(runner)
        for number, cell in enumerate(cells):
            done = (self.started + len(started) * number / len(cells)) / max(1, self.total)
            self.report(done, f"{', '.join(one.entry.name for one in started)}: {cell}")
            self.results.cells.extend(await self._cell(cell, started, plain))
            self.save(self.results)
        self.started += len(started)

    def announce(self, text: str) -> None:
        """Report what happens between measurements."""
        self.report(self.started / max(1, self.total), text)

    def skip(self, name: str, reason: str) -> None:
        """Record a competitor that cannot run."""
        self.results.skipped.append(Skipped(name, reason))
        self.started += 1

    async def _warm(self, contestant: Contestant) -> None:
        """Answer a few prompts at each batch, so that all is compiled and the controller has measured times.

        Where passes share stored blocks, all prompts are sent once before, for one token each: their blocks are stored
        before the measurements, else later passes would find what earlier ones have stored. Their answers are not, as
        drafts would repeat them. A server elsewhere keeps no passes apart.
        """
        prompts = [prompt for found in self.tasks.values() for prompt in found]
        is_stored = isinstance(contestant, EndpointContestant) or (
            isinstance(contestant, LocalContestant) and contestant.options.reuses_cache
        )
        temperature = self.schedule.temperatures[0]
        with suppress(PilotfishError):  # every cell reports the reason again
            if is_stored:
                storing = self._request(Cell("", max(self.schedule.batches), temperature))
                await contestant.answer(replace(storing, prompts=prompts, max_tokens=1))
            for batch in self.schedule.batches:
                some = (prompts * (2 * batch))[: max(2, 2 * batch)]
                await contestant.answer(replace(self._request(Cell("", batch, temperature)), prompts=some))

    async def _cell(self, cell: Cell, started: Sequence[Started], plain: Contestant | None) -> list[CellResult]:
        own: list[list[BenchPass]] = [[] for _ in started]
        problems = [""] * len(started)
        below: list[BenchPass] = []
        try:
            below += await self._around(cell, plain)
            for _ in range(self.schedule.repeats):
                for index, one in enumerate(started):
                    try:
                        own[index].append(await self._answer(cell, one.contestant))
                    except PilotfishError as error:
                        problems[index] = str(error)
                below += await self._around(cell, plain)
        except PilotfishError as error:
            problems = [problem or str(error) for problem in problems]
        gap: Gap | None = plain.gap if isinstance(plain, LocalContestant) and not plain.reads_source else None
        found: list[CellResult] = []
        for one, passes, problem in zip(started, own, problems, strict=True):
            if problem:
                found.append(CellResult(one.entry.name, cell, (), (), Exactness(), skipped=problem))
                continue
            total = Exactness()
            for own_pass in passes if below else ():
                total += await compare(self._request(cell), below[0], own_pass, gap, one.judge)
            found.append(CellResult(one.entry.name, cell, tuple(below), tuple(passes), total))
        return found

    async def _around(self, cell: Cell, plain: Contestant | None) -> list[BenchPass]:
        return [] if plain is None else [await self._answer(cell, plain)]

    async def _answer(self, cell: Cell, contestant: Contestant) -> BenchPass:
        request = self._request(cell)
        if self.meter is None:
            return await contestant.answer(request)
        begun = self.meter.start()
        found = await contestant.answer(request)
        return replace(found, resources=self.meter.stop(begun))

    def _request(self, cell: Cell) -> PassRequest:
        """The request of the next pass; every pass has a salt of its own."""
        self.passes += 1
        prompts = self.tasks.get(cell.task, ())
        most = self.max_tokens.get(cell.task, self.schedule.max_tokens)
        return PassRequest(prompts, cell.batch, cell.temperature, self.schedule.seed, most, f"bench-{self.passes}")
