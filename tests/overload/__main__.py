"""`make overload`: thousands of clients at once. Nothing may be lost, memory stays flat, `/health` stays quick.

    python -m tests.overload [--clients 2000] [--waves 3] [--tokens 8] [--config cpu] [--set key=value …]

Starts `pilotfish serve` and sends `clients` chats at once over HTTP, each on a connection of its own, in several waves.
Every request must be answered with status 200 and its end, or with 429 and `Retry-After`. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import psutil

from deploy.bench.measuring.measures import percentile
from tests.bench.processes.serve_command import ServeCommand
from tests.bench.report import write
from tests.overload.requests import Outcome, body_of, post

LONGEST_SECONDS = 600.0
SLOWEST_HEALTH_SECONDS = 0.5
SETTLE_SECONDS = 2.0
MOST_GROWTH = 0.05
"""Largest growth of the server's memory from the end of the first wave to the end of the last, as a share."""
MIB = 1 << 20


@contextmanager
def probed(url: str, into: list[tuple[float, int]]) -> Iterator[None]:
    """Ask `/health` from another process inside `with`; afterwards the answers are in `into`."""
    command = [sys.executable, "-m", "tests.overload.probe", url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield
    finally:
        output, _ = process.communicate(timeout=60.0)
        into.extend((seconds, status) for seconds, status in json.loads(output))


def resident_bytes(pid: int) -> int:
    """Memory of a process and all that it started, pages that several share counted once for each."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.Error:  # it ended in the meantime
            continue
    return total


async def wave(url: str, model: str, clients: int, tokens: int) -> list[Outcome]:
    """All clients at once."""
    return list(
        await asyncio.gather(*(post(url, body_of(model, index, tokens), LONGEST_SECONDS) for index in range(clients)))
    )


def quantiles(values: Sequence[float]) -> str:
    """p50, p99 and the most of some times."""
    if not values:
        return "–"
    return f"p50 {percentile(values, 0.5):.3f}, p99 {percentile(values, 0.99):.3f}, most {max(values):.3f} s"


def report(outcomes: Sequence[Outcome], seconds: float, health: Sequence[tuple[float, int]]) -> bool:
    """Print one wave. Returns whether nothing was lost and `/health` was quick."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    write(f"  {seconds:.1f} s; " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    for kind in ("answered", "refused"):
        write(f"  {kind}: {quantiles([outcome.seconds for outcome in outcomes if outcome.kind == kind])}")
    statuses = Counter(status for _, status in health)
    write(f"  /health: {len(health)} requests, status {dict(statuses)}, {quantiles([each for each, _ in health])}")
    slow = max((each for each, _ in health), default=0.0) > SLOWEST_HEALTH_SECONDS
    return set(kinds) <= {"answered", "refused"} and set(statuses) == {200} and not slow


def run(options: argparse.Namespace) -> bool:
    """All waves. Returns whether everything held."""
    with ServeCommand(options.config, options.set) as server:
        url = server.http_url
        model = httpx.get(f"{url}/v1/models", timeout=60.0).json()["data"][0]["id"]
        asyncio.run(wave(url, model, 8, options.tokens))
        memory = [resident_bytes(server.pid)]
        write(f"{options.clients} clients at once, {options.tokens} tokens each; {memory[0] / MIB:.0f} MiB before")
        holds = True
        for number in range(options.waves):
            health: list[tuple[float, int]] = []
            write(f"wave {number + 1}")
            with probed(url, health):
                begun = time.perf_counter()
                outcomes = asyncio.run(wave(url, model, options.clients, options.tokens))
                seconds = time.perf_counter() - begun
            holds &= report(outcomes, seconds, health)
            time.sleep(SETTLE_SECONDS)
            memory.append(resident_bytes(server.pid))
            write(f"  memory of all processes afterwards: {memory[-1] / MIB:.0f} MiB")
        growth = memory[-1] / memory[1] - 1
        write(
            f"growth from wave 1 to wave {options.waves}: {growth:.1%}; mean {statistics.fmean(memory) / MIB:.0f} MiB"
        )
        return holds and growth <= MOST_GROWTH


def main() -> None:
    """Run the waves and say whether everything held."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--config", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    holds = run(parser.parse_args())
    write("everything held" if holds else "NOT everything held")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
