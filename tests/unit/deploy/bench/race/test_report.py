"""The report of a race: tables that name every condition, plots, and raw figures."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deploy.bench.contestants.answers import Arrival, BenchAnswer, BenchPass
from deploy.bench.measuring.competitors import Skipped
from deploy.bench.measuring.results import BenchResults, Cell, CellResult, Cost, Entry, Exactness
from deploy.bench.race.report import markdown
from deploy.bench.report.charts import speedup_by_task, throughput_by_batch

MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "threads": 2,
    "instructions": "AVX512",
    "memory_bytes": 24 << 30,
    "gpus": [],
    "load": [0.5],
    "versions": {"torch": "2"},
    "time": "2026-01-01T00:00:00+00:00",
}


def taken(seconds: float, *accepted: int, lossless: bool = True) -> BenchPass:
    """A pass with one answer: one commit for each number of accepted tokens."""
    arrivals = tuple(Arrival(0.1 * (index + 1), count + 1, count) for index, count in enumerate(accepted))
    tokens = sum(arrival.tokens for arrival in arrivals)
    origins = {"request": 1, "earlier": sum(accepted) - 1} if any(accepted) else {}
    found = BenchAnswer(tuple(range(tokens)), arrivals, tokens, 2 * sum(accepted), len(accepted), lossless)
    found = replace(found, accepted_by_origin=origins)
    return BenchPass((found,), seconds, {"proposed_tokens": 8.0})


@pytest.fixture
def results() -> BenchResults:
    entry = Entry("lookup", "cluster", ("draft.method=ngram",), Cost(256 << 20, 0, 512 << 20, 2e9, 1e8, devices=2))
    plain, own = taken(4.0, 0, 0, 0, 0), taken(1.0, 1, 1)
    cells = [
        CellResult("lookup", Cell(task, batch, 0.0), (plain, plain), (own,), Exactness(equal=1))
        for batch in (1, 8)
        for task in ("qa", "retrieval")
    ]
    refused = CellResult("peer", Cell("qa", 8, 0.0), (), (), Exactness(), skipped="one sequence at a time")
    return BenchResults(
        "tiny in float32",
        MACHINE,
        "pilotfish bench race",
        "Stretched target",
        [entry],
        [*cells, refused],
        [Skipped("heads", "path must be set")],
    )


def row(text: str, name: str, after: str) -> list[str]:
    """The cells of the first row `name` after a heading."""
    lines = text[text.index(after) :].splitlines()
    return [cell.strip() for cell in next(line for line in lines if line.startswith(f"| {name} ")).split("|")[1:-1]]


def test_the_table_of_speed_has_every_figure(results: BenchResults) -> None:
    cells = row(markdown(results), "lookup", "## Speed, batch 1")
    assert cells[1:7] == ["4.00", "4.00", "2.00", "1.00", "2.00", "8, 4"]
    # 0.5 steps and 1.5 computed tokens of 2 GFLOP per token, and 2 proposed tokens of 0.1 GFLOP each
    assert cells[7] == "50% the request itself, 50% earlier answers"
    assert cells[8:] == ["1.00", "0.50", "3.20", "2 / 0 / 0"]
    assert row(markdown(results), "plain", "## Speed, batch 1")[1] == "1.00 (1.00–1.00)"


def test_every_heading_says_that_the_target_is_stretched(results: BenchResults) -> None:
    headings = [line for line in markdown(results).splitlines() if line.startswith(("## Speed", "## Latency"))]
    assert len(headings) == 6 and all("(stretched target)" in line for line in headings)


def test_a_task_has_its_own_ratio(results: BenchResults) -> None:
    assert row(markdown(results), "lookup", "## Speed by task")[1:] == ["4.00", "4.00"]


def test_latencies_are_in_milliseconds(results: BenchResults) -> None:
    assert row(markdown(results), "lookup", "## Latency")[1:] == ["100.00"] * 3 + ["50.00"] * 3


def test_an_interrupted_race_reports_what_it_measured(results: BenchResults) -> None:
    results.entries.append(Entry("second", "cluster", (), Cost()))
    results.cells[:] = [*results.cells[:1], replace(results.cells[0], competitor="second")]
    text = markdown(results)
    assert row(text, "lookup", "## Speed, batch 1")[1] == row(text, "second", "## Speed, batch 1")[1] == "4.00"
    assert "batch 8" not in text
    assert speedup_by_task(results)


def test_what_did_not_run_is_listed_with_its_reason(results: BenchResults) -> None:
    text = markdown(results)
    assert "| heads | path must be set |" in text
    assert "| peer, qa, batch 8, temperature 0 | one sequence at a time |" in text


def test_a_lossy_competitor_is_marked(results: BenchResults) -> None:
    lossy = CellResult("lookup", Cell("qa", 1, 1.0), (), (taken(1.0, 1, lossless=False),), Exactness())
    results.cells.append(lossy)
    assert "| lookup (NOT LOSSLESS) |" in markdown(results)


def test_json_holds_every_arrival(results: BenchResults) -> None:
    found = json.loads(results.to_json())
    assert found["cells"][0]["passes"][0]["answers"][0]["arrivals"][1] == {"seconds": 0.2, "tokens": 2, "accepted": 1}
    assert found["entries"][0]["cost"]["devices"] == 2 and found["command"] == "pilotfish bench race"


def test_the_plots_are_png_files(results: BenchResults) -> None:
    pytest.importorskip("matplotlib")
    for picture in (speedup_by_task(results), throughput_by_batch(results)):
        assert picture is not None and picture.startswith(b"\x89PNG")


def test_the_plots_name_their_axes_and_tell_competitors_apart(
    results: BenchResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    results.entries.extend(replace(results.entries[0], name=f"method {number}") for number in range(17))
    results.cells.extend(
        replace(found, competitor=entry.name) for entry in results.entries[1:] for found in results.cells[:4]
    )

    speedup_by_task(results)
    throughput_by_batch(results)

    for picture in drawn:
        (axes,) = picture.axes
        assert axes.get_xlabel() and axes.get_ylabel()
        shown = axes.get_legend_handles_labels()
        assert len(set(shown[1])) == len(shown[1]) >= 18
    bars, lines = (picture.axes[0] for picture in drawn)
    assert len({each.patches[0].get_facecolor() for each in bars.containers}) == 18
    assert len({line.get_color() for line in lines.get_lines()}) == 19
    low, high = lines.get_ylim()
    rates = [rate for line in lines.get_lines() for rate in line.get_ydata()]
    assert min(rates) / 2 < low <= min(rates) and max(rates) <= high < 2 * max(rates)


def test_a_race_without_measurements_has_no_plots(results: BenchResults) -> None:
    results.cells.clear()
    assert speedup_by_task(results) is None and throughput_by_batch(results) is None
    assert "# Race" in markdown(results)
