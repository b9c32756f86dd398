"""Runs a race: each competitor in turn, and plain decoding before and after each of its passes."""

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

    async def measure(self, entry: Entry, contestant: Contestant, plain: Contestant | None, judge: Judge) -> None:
        """Measure one competitor in all cells, and save the results."""
        self.results.entries.append(entry)
        cells = self.cells
        await self._warm(contestant, plain)
        for number, cell in enumerate(cells):
            done = (self.started + number / len(cells)) / max(1, self.total)
            self.report(done, f"{entry.name}, {cell}")
            self.results.cells.append(await self._cell(entry.name, cell, contestant, plain, judge))
        self.started += 1
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

    async def _cell(
        self, name: str, cell: Cell, contestant: Contestant, plain: Contestant | None, judge: Judge
    ) -> CellResult:
        own: list[RacePass] = []
        try:
            below = await self._around(cell, plain)
            for _ in range(self.options.repeats):
                own.append(await contestant.answer(self._request(cell)))
                below += await self._around(cell, plain)
        except PilotfishError as error:
            return CellResult(name, cell, (), (), Exactness(), skipped=str(error))
        gap: Gap | None = plain.gap if isinstance(plain, LocalContestant) else None
        total = Exactness()
        for found in own if below else ():
            total += await compare(self._request(cell), below[0], found, gap, judge)
        return CellResult(name, cell, tuple(below), tuple(own), total)

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
        for competitor in competitors:
            try:
                await _race_cluster(session, plain, competitor, baseline)
            except Exception as error:  # a method may raise anything; the others are measured all the same
                logger.exception("%s does not run", competitor.name)
                session.skip(competitor.name, str(error) or repr(error))
        if peers and baseline is None:
            for name in peers:
                session.skip(f"transformers: {name}", "memory does not hold the target twice")
        elif peers:
            await _race_peers(session, plain, peers, baseline, find_draft)


async def _race_cluster(
    session: RaceSession, plain: Configuration, competitor: Competitor, baseline: LocalContestant | None
) -> None:
    shares_noise = competitor.configuration.target.acceptance == _COUPLED
    judge = Judge(ROUNDING[plain.target.dtype], shares_noise)
    before = resident_bytes()
    session.announce(f"starting {competitor.name}")
    async with local_contestant(competitor.configuration) as contestant:
        cost = configuration_cost(competitor.configuration, resident_bytes() - before)
        entry = Entry(competitor.name, "cluster", competitor.assignments, cost, baseline is None)
        await session.measure(entry, contestant, baseline or contestant.without_drafts(), judge)


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
            await session.measure(entry, TransformersPeer(model, name, assistant), baseline, judge)
        except PilotfishError as error:
            session.skip(f"transformers: {name}", str(error))


async def race_endpoints(session: RaceSession, url: str, plain_url: str | None, model: str) -> None:
    """Measure an OpenAI-compatible server, against another one without drafts if there is one."""
    async with AsyncExitStack() as stack:
        contestant = await stack.enter_async_context(endpoint_contestant(url, model))
        plain = None if plain_url is None else await stack.enter_async_context(endpoint_contestant(plain_url, model))
        await session.measure(
            Entry(url, "endpoint", (), Cost(devices=session.options.devices)), contestant, plain, Judge(0.0)
        )


@asynccontextmanager
async def _plain_cluster(plain: Configuration) -> AsyncIterator[LocalContestant | None]:
    """A cluster without drafts, or `None` where memory does not hold it beside another cluster."""
    if not has_room_for_two(plain, configuration_cost(plain).target_bytes):
        yield None
        return
    async with local_contestant(plain) as baseline:
        yield baseline
