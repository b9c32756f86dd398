"""Prints measurements as Markdown tables, every figure with its spread, and keeps them as a result file."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.bench.report.tables import markdown_table

_title = ""
_printed: list[dict[str, Any]] = []
"""The tables that were printed, each with the title of its section."""


def write(line: str = "") -> None:
    """Print one line at once, because measurements take minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def heading(title: str) -> None:
    """Print the title of a section."""
    global _title
    _title = title
    write(f"\n## {title}\n")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (least–most)`, or the only value."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Each value divided by the other of the same repetition. Raises `ValueError` for unequal lengths."""
    return [one / other for one, other in zip(above, below, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all (0 to 1) do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. The first column is text, the others are figures."""
    _printed.append({"title": _title, "columns": list(columns), "rows": [list(row) for row in rows]})
    write(f"\n{markdown_table(columns, rows)}\n")


def keep(file: Path, machine: str, command: str) -> None:
    """Write all tables that were printed to a result file, from which `make pages` makes BENCHMARKS.md.

    The figures that the page shows are chosen by hand: entries of `figures` with a question and cells of the tables.
    """
    found = {
        "machine": machine,
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        "tables": _printed,
        "figures": [],
    }
    file.write_text(json.dumps(found, ensure_ascii=False, indent=1), "utf-8")


class Stopwatch:
    """`with Stopwatch() as watch: …`, then `watch.seconds`."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begun
