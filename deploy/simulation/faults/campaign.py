"""Runs many fault schedules in several processes and sums up what happened."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from cluster.core.errors import PilotfishError
from deploy.simulation.faults.run import FaultRun, run_schedule

_MOST_SHOWN = 20


@dataclass(slots=True)
class CampaignResult:
    """The sums over all schedules."""

    schedules: int = 0
    seconds: float = 0.0
    """Real time, in seconds."""
    clients: int = 0
    complete: int = 0
    """Clients that read their whole answer."""
    tokens: int = 0
    accepted: int = 0
    steps: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    """Number of processes killed, by role."""
    freezes: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)
    """The violations by seed."""

    def add(self, run: FaultRun) -> None:
        """Add one run."""
        self.schedules += 1
        self.clients += run.clients
        self.complete += run.complete
        self.tokens += run.tokens
        self.accepted += run.accepted
        self.steps += run.steps
        self.kills.update(run.kills)
        self.freezes.update(run.freezes)
        self.messages.update(run.messages)
        if run.violations:
            self.failed[run.seed] = run.violations

    def lines(self) -> Iterator[str]:
        """The result as text."""
        rate = self.schedules / self.seconds if self.seconds else 0.0
        yield f"{self.schedules} schedules in {self.seconds:.1f} s ({rate:.1f} per second)"
        yield (
            f"{self.clients} requests, {self.complete} read to the end, {self.tokens} tokens compared, "
            f"{self.accepted} of them drafted, {self.steps} steps"
        )
        yield f"killed: {_counts(self.kills)}; frozen: {_counts(self.freezes)}; messages: {_counts(self.messages)}"
        yield f"{len(self.failed)} schedules broke an invariant"
        for seed, violations in sorted(self.failed.items())[:_MOST_SHOWN]:
            yield f"seed {seed}: {violations[0]} (again: pilotfish simulate faults --replay {seed})"


def run_all(
    first: int, schedules: int, workers: int, report: Callable[[float, str], None] | None = None
) -> CampaignResult:
    """Run the schedules with the seeds from `first` on. `report` receives the share that is done, and a text."""
    result = CampaignResult()
    begun = time.monotonic()

    def add(run: FaultRun) -> None:
        result.add(run)
        if report is not None:
            report(result.schedules / schedules, f"{result.schedules} schedules, {len(result.failed)} failed")

    if workers == 1:
        for seed in range(first, first + schedules):
            add(run_schedule(seed))
    else:
        asyncio.run(_in_processes(first, schedules, workers, add))
    result.seconds = time.monotonic() - begun
    return result


def to_line(run: FaultRun) -> str:
    """A run as one line of JSON."""
    return json.dumps(asdict(run))


async def _in_processes(first: int, schedules: int, workers: int, add: Callable[[FaultRun], None]) -> None:
    bounds = [first + schedules * index // workers for index in range(workers + 1)]
    parts = [(begin, end - begin) for begin, end in pairwise(bounds) if end > begin]
    await asyncio.gather(*(_run_part(begin, count, add) for begin, count in parts))


async def _run_part(first: int, count: int, add: Callable[[FaultRun], None]) -> None:
    command = ("-m", "deploy.cli", "simulate", "faults", "--seed", str(first), "--schedules", str(count), "--lines")
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    if process.stdout is None:
        raise PilotfishError("the output of a worker process is missing")
    runs = 0
    try:
        async for line in process.stdout:
            add(FaultRun(**json.loads(line)))
            runs += 1
    finally:
        if process.returncode is None and runs < count:
            process.kill()
        await process.wait()
    if runs < count:
        raise PilotfishError(f"a worker process ended after {runs} of {count} schedules")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
