"""How long `pilotfish serve` takes from its command until it is ready, by stage, and the CPU time of its processes.

The first start of each pair is cold: it has no prepared model, no packed weights and no compiled kernels. The second
one is warm: it has what the first has written. For both, the system's page cache has the files of the model and of
Python's packages, if an earlier start has read them.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import psutil

from cluster.core.errors import ConfigurationError
from tests.bench.options import PLAIN_WEIGHTS, Options
from tests.bench.processes.cache_variables import CODE, cache_variables
from tests.bench.processes.serve_command import POLL_SECONDS, ServeCommand
from tests.bench.processes.serve_report import ROLES, cpu_seconds
from tests.bench.processes.staged_serve import READY
from tests.bench.report import heading, spread, table, write
from workers.model.packed_weights.store import FOLDER, SUFFIX, packed_file

_ROLES = ROLES | {
    "ray::ServeController": "Serve's controller",
    "ray::Directory": "directory",
    "ray::IDLE": "idle workers of Ray",
}
_FIRST = "the command itself"
"""The stage before the first one that the command reports."""
_PACKED_SECONDS = 60.0
"""Longest wait for the packed weights of the first start, in seconds."""
STORED = "stored"
"""The variant whose weights stay as they are stored. The others are de-quantized, in the types of `--dtypes`."""
_Figures = dict[tuple[str, str], list[float]]
"""By the row and the column."""


def run(options: Options) -> None:
    """Measure and report."""
    heading("Start of pilotfish serve, cold and warm")
    write("cold: without a prepared model, packed weights and compiled code of ours; the page cache is not emptied")
    stages: _Figures = defaultdict(list)
    used: _Figures = defaultdict(list)
    variants = start_variants(options)
    for repeat in range(options.repeats):
        for name, assignments in variants.items():
            with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as caches:
                for kind in ("cold", "warm"):
                    seconds = _start(options, assignments, Path(caches), f"{name}, {kind}", (stages, used))
                    write(f"repetition {repeat + 1}, {name}, {kind}: ready after {seconds:.2f} s")
    columns = [f"{name}, {kind}" for name in variants for kind in ("cold", "warm")]
    for title, figures in (("seconds", stages), ("CPU seconds until ready", used)):
        names = list(dict.fromkeys(name for name, _ in figures))
        rows = [[name, *(spread(figures.get((name, one), [0.0])) for one in columns)] for name in names]
        table((title, *columns), rows)


def start_variants(options: Options) -> dict[str, tuple[str, ...]]:
    """The settings of each variant of `--variants`, or of all, by name.

    Raises `ConfigurationError` for unknown names.
    """
    known: dict[str, tuple[str, ...]] = {STORED: (f"target.quantization={STORED}",)}
    known |= {dtype: (f"target.dtype={dtype}", PLAIN_WEIGHTS) for dtype in options.dtypes}
    if unknown := [name for name in options.variants if name not in known]:
        raise ConfigurationError(f"--variants: {unknown} are refused; they must be among {', '.join(known)}")
    return {name: known[name] for name in options.variants or known}


def _start(
    options: Options, assignments: tuple[str, ...], caches: Path, column: str, figures: tuple[_Figures, _Figures]
) -> float:
    """Start once, and wait until what later starts read has been written. Returns the seconds until it was ready."""
    stages, used = figures
    settings, variables = (*options.assignments, *assignments), cache_variables(caches)
    begun = time.time()
    with ServeCommand(options.config, settings, "tests.bench.processes.staged_serve", environment=variables) as server:
        times = [(_FIRST, begun), *server.stages]
        command = psutil.Process(server.pid).cpu_times()
        used["the command", column].append(command.user + command.system)
        for role, seconds in cpu_seconds(server.pid, _ROLES).items():
            used[role, column].append(seconds)
        if packed_file(options.configuration(*assignments).target) is not None:
            _await_packed(Path(variables[CODE]))
    for (name, at), (_, ended) in pairwise(times):
        stages[name, column].append(ended - at)
    ready = times[-1][1] - begun
    stages[READY, column].append(ready)
    return ready


def _await_packed(code: Path) -> None:
    """Return once a start has written its packed weights into the folder of `code`, or after a while."""
    deadline = time.monotonic() + _PACKED_SECONDS
    while not [*(code / FOLDER).glob(f"*{SUFFIX}")] and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
