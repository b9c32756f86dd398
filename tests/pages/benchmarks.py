"""The tables of BENCHMARKS.md, from the result files in `tests/bench/results`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
PAGE = Path(__file__).resolve().parents[2] / "BENCHMARKS.md"
QUESTIONS = ("peers", "drafts", "batch", "round", "memory", "faults", "translation", "device", "gpu")
_BEGIN, _END = "<!-- figures: {} -->", "<!-- end -->"

Result = Mapping[str, Any]


def page() -> str:
    """Return BENCHMARKS.md with its tables made anew. The text between them is written by hand."""
    text = PAGE.read_text("utf-8")
    results = {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(RESULTS.glob("*.json"))}
    told: set[str] = set()
    for question in QUESTIONS:
        before, rest = text.split(_BEGIN.format(question))
        after = rest.split(_END, 1)[1]
        text = f"{before}{_BEGIN.format(question)}\n{_table(question, results, told)}\n{_END}{after}"
    return text


def _table(question: str, results: Mapping[str, Result], told: set[str]) -> str:
    """The figures of a question, and the commands of their runs that no table before has. Adds the runs to `told`."""
    lines = [f"| what | {'predicted' if question == 'gpu' else 'measured'} | run |", "|---|---|---|"]
    commands = []
    for name, result in results.items():
        figures = [figure for figure in result["figures"] if figure["question"] == question]
        run = f"[{name}](tests/bench/results/{name}.json), {result['machine']}, {result['date']}"
        lines += [f"| {figure['what']} | {measured(figure, result)} | {run} |" for figure in figures]
        if figures and name not in told:
            told.add(name)
            commands.append(f"- {name}: `{result['command'].replace('`', '')}`{_note(result)}")
    return "\n".join([*lines, *(["", *commands] if commands else [])])


def _note(result: Result) -> str:
    return f". {result['note']}" if result.get("note") else ""


def measured(figure: Mapping[str, Any], result: Result) -> str:
    """The cells of the result's tables that a figure names, or its own text where the command prints none."""
    if "measured" in figure:
        return str(figure["measured"])
    return "; ".join(_cells(figure["cells"], result["tables"]))


def _cells(cells: list[list[int]], tables: list[dict[str, Any]]) -> Iterator[str]:
    for table, row, column in cells:
        yield tables[table]["rows"][row][column]
