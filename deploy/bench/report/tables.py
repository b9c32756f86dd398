"""Tables and lines that several reports share, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.bench.measuring.results import BenchResults

UNKNOWN = "–"


def machine_line(machine: Mapping[str, Any]) -> str:
    """One line about the machine, from `describe_machine`."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, {machine['instructions']}"
        f"{gpus}, {machine['memory_bytes'] / 2**30:.0f} GiB, load {machine['load'][0]} at the start; {versions}; "
        f"{machine['time']}"
    )


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown. The first column is aligned to the left, the others to the right."""
    lines = [f"| {' | '.join(columns)} |", f"|---{'|---:' * (len(columns) - 1)}|"]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def not_run(results: BenchResults) -> str:
    """A section about the competitors that did not run, and why; empty if all did."""
    rows = [[skipped.name, skipped.reason] for skipped in results.skipped]
    rows += [[f"{found.competitor}, {found.cell}", found.skipped] for found in results.cells if found.skipped]
    return f"## Not run\n\n{markdown_table(('competitor', 'reason'), rows)}" if rows else ""


def or_unknown(value: object) -> str:
    """The value as text; a dash for `None`."""
    return UNKNOWN if value is None else str(value)


def number(value: float | None, digits: int = 2) -> str:
    """The value with some digits; a dash for `None`."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"
