"""Runs a race: competitors in turn, and plain decoding before and after each group of their passes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from cluster.core.config.sections import Configuration
from cluster.core.errors import PilotfishError
from deploy.race.answers import PassRequest, RacePass
from deploy.race.competitors import Competitor, Skipped
from deploy.race.contestants.contestant import Contestant
from deploy.race.contestants.endpoint import endpoint_contestant
from deploy.race.contestants.local import LocalContestant, local_contestant
from deploy.race.costs import configuration_cost, resident_bytes
from deploy.race.exactness import ROUNDING, Exactness, Gap, Judge, compare
from deploy.race.options import RaceOptions
from deploy.race.results import Cell, CellResult, Cost, Entry, RaceResults
from deploy.race.tasks import RaceTasks

logger = logging.getLogger(__name__)

_ROOM = 2.5
"""A second cluster with the target's weights is started only where this many times their bytes are free."""

_COUPLED = "coupled"
"""The acceptance rule with which sampled answers equal those of plain decoding."""

Report = Callable[[float, str], None]
Save = Callable[[RaceResults], None]


def plan_cells(tasks: RaceTasks, options: RaceOptions) -> tuple[Cell, ...]:
    """All combinations of batch, temperature and task, in the order in which they run."""
    return tuple(
        Cell(task, batch, temperature)
        for batch in options.batches
        for temperature in options.temperatures
        for task in tasks
    )


@dataclass(frozen=True, slots=True)
class Started:
    """A competitor that has started."""

    entry: Entry
    contestant: Contestant
    judge: Judge


@dataclass(slots=True)
class RaceSession:
    """Measures competitors on the same prompts."""

    options: RaceOptions
    tasks: RaceTasks
    results: RaceResults
    report: Report
    save: Save
    total: int
    """Number of competitors, for the progress."""
    started: int = 0
    passes: int = 0

    @property
    def cells(self) -> tuple[Cell, ...]:
        """See `plan_cells`."""
        return plan_cells(self.tasks, self.options)

    async def measure(self, started: Sequence[Started], plain: Contestant | None) -> None:
        """Measure competitors in all cells, each in turn between two passes of plain decoding, and save the results."""
        self.results.entries.extend(one.entry for one in started)
        cells = self.cells
        for one in started:
            await self._warm(one.contestant, plain)
        for number, cell in enumerate(cells):
            done = (self.started + len(started) * number / len(cells)) / max(1, self.total)
            self.report(done, f"{', '.join(one.entry.name for one in started)}: {cell}")
            self.results.cells.extend(await self._cell(cell, started, plain))
        self.started += len(started)
        self.save(self.results)

    def announce(self, text: str) -> None:
        """Report what happens between measurements."""
        self.report(self.started / max(1, self.total), text)

    def skip(self, name: str, reason: str) -> None:
        """Record a competitor that cannot run."""
        self.results.skipped.append(Skipped(name, reason))
        self.started += 1

    async def _warm(self, contestant: Contestant, plain: Contestant | None) -> None:
        """Answer a few prompts at each batch, so that all is compiled and the controller has measured times."""
        prompts = [prompt for found in self.tasks.values() for prompt in found]
        for batch in self.options.batches:
            warming = Cell("", batch, self.options.temperatures[0])
            some = (prompts * (2 * batch))[: max(2, 2 * batch)]
            for runner in filter(None, (plain, contestant)):
                with suppress(PilotfishError):  # every cell reports the reason again
                    await runner.answer(replace(self._request(warming), prompts=some))

    async def _cell(self, cell: Cell, started: Sequence[Started], plain: Contestant | None) -> list[CellResult]:
        own: list[list[RacePass]] = [[] for _ in started]
        problems = [""] * len(started)
        below: list[RacePass] = []
        try:
            below += await self._around(cell, plain)
            for _ in range(self.options.repeats):
                for index, one in enumerate(started):
                    try:
                        own[index].append(await one.contestant.answer(self._request(cell)))
                    except PilotfishError as error:
                        problems[index] = str(error)
                below += await self._around(cell, plain)
        except PilotfishError as error:
            problems = [problem or str(error) for problem in problems]
        gap: Gap | None = plain.gap if isinstance(plain, LocalContestant) else None
        found: list[CellResult] = []
        for one, passes, problem in zip(started, own, problems, strict=True):
            if problem:
                found.append(CellResult(one.entry.name, cell, (), (), Exactness(), skipped=problem))
                continue
            total = Exactness()
            for race_pass in passes if below else ():
                total += await compare(self._request(cell), below[0], race_pass, gap, one.judge)
            found.append(CellResult(one.entry.name, cell, tuple(below), tuple(passes), total))
        return found

    async def _around(self, cell: Cell, plain: Contestant | None) -> list[RacePass]:
        return [] if plain is None else [await plain.answer(self._request(cell))]

    def _request(self, cell: Cell) -> PassRequest:
        """The request of the next pass; every pass has a salt of its own."""
        self.passes += 1
        prompts = self.tasks.get(cell.task, ())
        return PassRequest(
            prompts, cell.batch, cell.temperature, self.options.seed, self.options.max_tokens, f"race-{self.passes}"
        )


def has_room_for_two(configuration: Configuration, weight_bytes: int) -> bool:
    """Whether a second cluster fits into memory beside the one with plain decoding."""
    return configuration.target.device == "cuda" or psutil.virtual_memory().available > _ROOM * weight_bytes


async def race_clusters(
    session: RaceSession,
    plain: Configuration,
    competitors: Sequence[Competitor],
    peers: Sequence[str] = (),
    find_draft: Callable[[], Path] | None = None,
) -> None:
    """Measure clusters in this process, then the methods `peers` of `transformers`.

    `find_draft` finds the draft model of assisted generation. Raises `PilotfishError` if plain decoding cannot start.
    """
    async with _plain_cluster(plain) as baseline:
        together = 1 if baseline is None else session.options.together
        for first in range(0, len(competitors), together):
            await _race_group(session, plain, competitors[first : first + together], baseline)
        if peers and baseline is None:
            for name in peers:
                session.skip(f"transformers: {name}", "memory does not hold the target twice")
        elif peers:
            await _race_peers(session, plain, peers, baseline, find_draft)


async def _race_group(
    session: RaceSession, plain: Configuration, competitors: Sequence[Competitor], baseline: LocalContestant | None
) -> None:
    """Measure clusters that run side by side. Only one of them answers at a time."""
    async with AsyncExitStack() as stack:
        started: list[Started] = []
        contestant: LocalContestant | None = None
        for competitor in competitors:
            session.announce(f"starting {competitor.name}")
            before = resident_bytes()
            try:
                contestant = await stack.enter_async_context(local_contestant(competitor.configuration))
            except Exception as error:  # a method may raise anything; the others are measured all the same
                logger.exception("%s does not start", competitor.name)
                session.skip(competitor.name, str(error) or repr(error))
                continue
            cost = configuration_cost(competitor.configuration, resident_bytes() - before)
            shares_noise = competitor.configuration.target.acceptance == _COUPLED
            started.append(
                Started(
                    Entry(competitor.name, "cluster", competitor.assignments, cost, baseline is None),
                    contestant,
                    Judge(ROUNDING[plain.target.dtype], shares_noise),
                )
            )
        if contestant is not None:
            await session.measure(started, baseline or contestant.without_drafts())


async def _race_peers(
    session: RaceSession,
    plain: Configuration,
    peers: Sequence[str],
    baseline: LocalContestant | None,
    find_draft: Callable[[], Path] | None,
) -> None:
    """Measure the decoding methods of `transformers`, one after another, with one copy of the target."""
    from deploy.race.contestants.peers import ASSISTED, TransformersPeer, load_assistant, load_target

    before = resident_bytes()
    model = load_target(plain)
    cost = replace(configuration_cost(plain, resident_bytes() - before), target_flops=0.0)
    judge = Judge(ROUNDING[plain.target.dtype], shares_noise=False)
    for name in peers:
        try:
            assistant = None
            if name == ASSISTED and find_draft is not None:
                assistant = load_assistant(find_draft(), Path(plain.target.path), model)
            entry = Entry(f"transformers: {name}", "peer", (), cost)
            await session.measure([Started(entry, TransformersPeer(model, name, assistant), judge)], baseline)
        except PilotfishError as error:
            session.skip(f"transformers: {name}", str(error))


async def race_endpoints(session: RaceSession, url: str, plain_url: str | None, model: str) -> None:
    """Measure an OpenAI-compatible server, against another one without drafts if there is one."""
    async with AsyncExitStack() as stack:
        contestant = await stack.enter_async_context(endpoint_contestant(url, model))
        plain = None if plain_url is None else await stack.enter_async_context(endpoint_contestant(plain_url, model))
        entry = Entry(url, "endpoint", (), Cost(devices=session.options.devices))
        await session.measure([Started(entry, contestant, Judge(0.0))], plain)


@asynccontextmanager
async def _plain_cluster(plain: Configuration) -> AsyncIterator[LocalContestant | None]:
    """A cluster without drafts, or `None` where memory does not hold it beside another cluster."""
    if not has_room_for_two(plain, configuration_cost(plain).target_bytes):
        yield None
        return
    async with local_contestant(plain) as baseline:
        yield baseline
