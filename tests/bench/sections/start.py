"""How long `pilotfish serve` takes from its command to the first answer, by stage, and the CPU time of its processes.

Every start is warm: one that is not counted has written packed weights and compiled kernels before.
"""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise

import psutil

from tests.bench.options import Options
from tests.bench.processes.serve_command import POLL_SECONDS, ServeCommand
from tests.bench.processes.serve_report import ROLES, cpu_seconds
from tests.bench.processes.staged_serve import READY
from tests.bench.report import heading, spread, table, write
from workers.model.packed_weights.store import packed_file

_ROLES = ROLES | {
    "ray::ServeController": "Serve's controller",
    "ray::Directory": "directory",
    "ray::IDLE": "idle workers of Ray",
}
_FIRST = "the command itself"
"""The stage before the first one that the command reports."""
_PACKED_SECONDS = 60.0
"""Longest wait for the packed weights of the first start, in seconds."""


def run(options: Options) -> None:
    """Measure and report."""
    heading("Start of pilotfish serve, warm")
    stages: dict[tuple[str, str], list[float]] = defaultdict(list)
    used: dict[tuple[str, str], list[float]] = defaultdict(list)
    for dtype in options.dtypes:
        _warm(options, dtype)
    for repeat in range(options.repeats):
        for dtype in options.dtypes:
            begun = time.time()
            with _serve(options, dtype) as server:
                times = [(_FIRST, begun), *server.stages]
                command = psutil.Process(server.pid).cpu_times()
                used["the command", dtype].append(command.user + command.system)
                for role, seconds in cpu_seconds(server.pid, _ROLES).items():
                    used[role, dtype].append(seconds)
            for (name, at), (_, ended) in pairwise(times):
                stages[name, dtype].append(ended - at)
            stages[READY, dtype].append(times[-1][1] - begun)
            write(f"repetition {repeat + 1}, {dtype}: ready after {times[-1][1] - begun:.2f} s")
    for title, figures in (("seconds", stages), ("CPU seconds until ready", used)):
        names = list(dict.fromkeys(name for name, _ in figures))
        rows = [[name, *(spread(figures[name, dtype]) for dtype in options.dtypes)] for name in names]
        table((title, *options.dtypes), rows)


def _serve(options: Options, dtype: str) -> ServeCommand:
    settings = (*options.assignments, f"target.dtype={dtype}")
    return ServeCommand(options.config, settings, "tests.bench.processes.staged_serve")


def _warm(options: Options, dtype: str) -> None:
    """Start once, and wait until what later starts read has been written."""
    file = packed_file(options.configuration(f"target.dtype={dtype}").target)
    with _serve(options, dtype):
        deadline = time.monotonic() + _PACKED_SECONDS
        while file is not None and not file.exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
