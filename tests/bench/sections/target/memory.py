"""Compares the memory of the target's process with its weights and pool, and measures its cold and warm start.

With `--variants loading`: the memory that ranks take while they load a stored file of 4 GB, which is made up, beside
their share of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cluster.core.config.sections import Configuration
from cluster.core.config.target_section import TargetSection
from deploy.settings import cache_directory, code_directory
from tests.bench.machine import MIB, weight_bytes
from tests.bench.options import Options
from tests.bench.processes.cache_variables import cache_variables
from tests.bench.processes.load_process import LoadingMemory, measure, most_loading_bytes
from tests.bench.processes.target_process import Footprint
from tests.bench.random_model import Shape
from tests.bench.report import heading, ratios, spread, table, write

ROOT = Path(__file__).resolve().parents[3]
POOL_BYTES, QUICK_POOL_BYTES = 512 * MIB, 64 * MIB
"""Pool sizes: the first is used if the configuration names none."""
LONGEST_SECONDS = 1800.0
LOADED, QUICK_LOADED = Shape(3072, 9216, 60, 24, 6, 49152), Shape(1536, 4608, 18, 12, 3, 24576)
"""Models whose stored files have 4.0 GB and 0.4 GB."""
RANKS = (1, 3)


def run(options: Options) -> None:
    """Measure and report: per repetition and type, a cold start with empty caches, then a warm one with the same."""
    if "loading" in options.variants:
        _run_loading(options)
        return
    heading("Memory and start of the target's process")
    memory: list[list[str]] = []
    starts: list[list[str]] = []
    for dtype in options.dtypes:
        configuration = _with_pool(options, dtype)
        cold: list[Footprint] = []
        warm: list[Footprint] = []
        for repeat in range(options.repeats):
            with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as caches:
                cold.append(start(configuration, Path(caches), fill=False))
                warm.append(start(configuration, Path(caches), fill=True))
            write(f"repetition {repeat + 1}, {dtype}: {cold[-1].ready_seconds:.1f} and {warm[-1].ready_seconds:.1f} s")
        memory.append(_memory_row(configuration, warm))
        starts.append(_start_row(configuration, cold, warm))
    table(
        (
            "type",
            "weights, MB",
            "pool, MB",
            "code before loading, MB",
            "peak until ready, MB",
            "after steps of many widths, MB",
            "and with a full pool, MB",
            "÷ (weights + pool)",
            "without code",
            "held in the end, MB",
            "1.2 × weights + pool + 250",
        ),
        memory,
    )
    table(("type", "cold start to ready, s", "warm, s", "warm ÷ cold", "peak of a cold start, MB"), starts)


def _run_loading(options: Options) -> None:
    """Measure the memory of each rank while it loads."""
    heading("Memory while stored weights load")
    rows: list[list[str]] = []
    shape = QUICK_LOADED if options.quick else LOADED
    with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as name:
        shape.write_gguf(Path(name))
        for ranks in RANKS:
            section = loading_section(Path(name), ranks, code_directory(cache_directory()))
            found = [one for _ in range(options.repeats) for one in measure(section, LONGEST_SECONDS)]
            rows.append(_loading_row(shape.gguf_bytes(ranks), ranks, found))
    columns = ("ranks", "share of the file, MB", "code before, MB", "peak beyond it, MB", "held, MB")
    table((*columns, "1.15 × share + 200"), rows)


def loading_section(directory: Path, ranks: int, code: Path) -> TargetSection:
    """The target whose loading is measured. `code` has the compiled CPU kernels; layers are not compiled."""
    values: dict[str, object] = {"path": str(directory), "device": "cpu", "quantization": "stored", "threads": 1}
    values |= {"compile": "off", "compile_directory": str(code), "tensor_parallel": ranks}
    return TargetSection.model_validate(values)


def _loading_row(share: int, ranks: int, found: list[LoadingMemory]) -> list[str]:
    return [
        str(ranks),
        f"{share / 1e6:.0f}",
        *(
            spread([getattr(one, name) / 1e6 for one in found], 0)
            for name in ("before_bytes", "peak_bytes", "held_bytes")
        ),
        f"{most_loading_bytes(share) / 1e6:.0f}",
    ]


def _with_pool(options: Options, dtype: str) -> Configuration:
    """The configuration with a pool of known size, a small one with `--quick`."""
    configuration = options.configuration(f"target.dtype={dtype}")
    if configuration.target.kv.pool_bytes is not None and not options.quick:
        return configuration
    size = QUICK_POOL_BYTES if options.quick else POOL_BYTES
    return options.configuration(f"target.dtype={dtype}", f"target.kv.pool_bytes={size}")


def start(configuration: Configuration, caches: Path, *, fill: bool) -> Footprint:
    """Run the process once; with `fill`, until every block of its pool is written.

    Raises `RuntimeError` with its last errors when it fails.
    """
    target = configuration.target.model_copy(update={"compile_directory": str(caches / "compiled")})
    configuration = configuration.model_copy(update={"target": target})
    environment = os.environ | cache_variables(caches)
    command = [
        sys.executable,
        "-m",
        "tests.bench.processes.target_process",
        configuration.model_dump_json(),
        str(time.time()),
    ]
    command.extend(["fill"] * fill)
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )
    if ended.returncode != 0:
        raise RuntimeError(f"the target's process ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return Footprint(**json.loads(ended.stdout.splitlines()[-1]))


def _memory_row(configuration: Configuration, lives: list[Footprint]) -> list[str]:
    weights, pool = weight_bytes(configuration.target), configuration.target.kv.pool_bytes or 0
    promised = [float(weights + pool)] * len(lives)
    return [
        configuration.target.dtype,
        f"{weights / 1e6:.0f}",
        f"{pool / 1e6:.0f}",
        spread([life.code_bytes / 1e6 for life in lives], 0),
        spread([life.ready_bytes / 1e6 for life in lives], 0),
        spread([life.used_bytes / 1e6 for life in lives], 0),
        spread([life.full_bytes / 1e6 for life in lives], 0),
        spread(ratios([life.full_bytes for life in lives], promised)),
        spread(ratios([life.full_bytes - life.code_bytes for life in lives], promised)),
        spread([life.held_bytes / 1e6 for life in lives], 0),
        f"{(1.2 * weights + pool) / 1e6 + 250:.0f}",
    ]


def _start_row(configuration: Configuration, cold: list[Footprint], warm: list[Footprint]) -> list[str]:
    cold_seconds, warm_seconds = ([life.ready_seconds for life in lives] for lives in (cold, warm))
    return [
        configuration.target.dtype,
        spread(cold_seconds, 1),
        spread(warm_seconds, 1),
        spread(ratios(warm_seconds, cold_seconds)),
        spread([life.ready_bytes / 1e6 for life in cold], 0),
    ]
