"""The figures of a load test, from recorded requests, and the report of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from deploy.bench.contestants.answers import Arrival, BenchAnswer
from deploy.bench.load_test.records import LoadRecord, Measurement
from deploy.bench.load_test.report import LoadResults, as_json, chart, markdown, write


def record(sent: float, *arrivals: tuple[float, int]) -> LoadRecord:
    parts = tuple(Arrival(seconds, tokens) for seconds, tokens in arrivals)
    tokens = sum(part.tokens for part in parts)
    return LoadRecord(sent, BenchAnswer((), parts, tokens, drafted=3, steps=len(parts)), prompt_tokens=10)


FAST = record(0.0, (0.1, 1), (0.2, 2), (0.4, 2))
SLOW = record(0.2, (0.8, 1), (1.0, 1))
LOST = LoadRecord(0.3, error="HTTP 429")
BOUNDS = {"ttft": 0.5, "tpot": 0.1}


def measurement(rate: float = 2.0, *records: LoadRecord) -> Measurement:
    return Measurement(rate, 4, 2.0, records or (FAST, SLOW, LOST), BOUNDS)


def test_the_figures_of_a_request() -> None:
    figures = FAST.figures
    assert figures["ttft"] == 0.1
    assert figures["tpot"] == pytest.approx(0.3 / 4)
    assert figures["itl"] == pytest.approx(0.15)
    assert figures["e2el"] == 0.4
    assert record(0.0, (0.5, 1)).figures == {"ttft": 0.5, "tpot": None, "itl": None, "e2el": 0.5}
    assert set(LOST.figures.values()) == {None}


def test_the_figures_of_a_measurement() -> None:
    found = measurement()
    assert (len(found.completed), found.errors) == (2, {"HTTP 429": 1})
    assert (found.prompt_tokens, found.output_tokens, found.per_second(found.output_tokens)) == (20, 7, 3.5)
    assert found.most_in_flight == 2
    assert found.goodput == 0.5, "one of three requests in 2 s kept both bounds; a lost one keeps none"
    assert found.accepted_share == pytest.approx(1 - 5 / 7)
    latency = found.latency("itl")
    assert latency is not None and (latency["p50"], latency["p99"]) == pytest.approx((0.2, 0.2))
    ttft = found.latency("ttft")
    assert ttft == {"mean": pytest.approx(0.45), "p50": 0.1, "p90": 0.8, "p99": 0.8}


def test_a_report_says_which_accepted_drafts_are_copies_of_earlier_answers() -> None:
    def answered(**counts: int) -> LoadRecord:
        return LoadRecord(0.0, BenchAnswer((), (Arrival(0.1, 8),), 8, accepted_by_origin=counts))

    found = measurement(2.0, answered(request=1, earlier=2, trained=0, forced=0), answered(earlier=1), LOST)
    assert found.accepted_by_origin == {"request": 1, "earlier": 3, "trained": 0, "forced": 0}
    assert "| 25% the request itself, 75% earlier answers |" in markdown(LoadResults("t", {}, "c", [found]))
    assert measurement().accepted_by_origin == {}


def test_a_measurement_without_answers_has_no_latency() -> None:
    found = measurement(1.0, LOST)
    assert (found.latency("ttft"), found.latency("itl"), found.goodput, found.accepted_share) == (None, None, 0.0, None)
    assert "| – |" in markdown(LoadResults("t", {}, "c", [found]))


@pytest.mark.parametrize("rates", [(2.0,), (2.0, math.inf)])
def test_the_report_is_json_markdown_and_a_picture(rates: tuple[float, ...], tmp_path: Path) -> None:
    results = LoadResults("small at http://server", {}, "pilotfish bench serve", [measurement(rate) for rate in rates])
    write(results, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "serve.json").read_text(encoding="utf-8"))
    assert found == json.loads(json.dumps(as_json(results)))
    first = found["measurements"][0]
    assert first["latency_seconds"]["ttft"]["p90"] == 0.8 and first["goodput_bounds_seconds"] == BOUNDS
    assert [request.get("error") for request in first["requests"]] == [None, None, "HTTP 429"]
    assert found["measurements"][-1]["request_rate"] == (None if len(rates) == 2 else 2.0)
    text = (tmp_path / "out" / "serve.md").read_text(encoding="utf-8")
    assert "Goodput counts the requests with ttft ≤ 500 ms, tpot ≤ 100 ms." in text
    assert "- 2, 4: 1 × HTTP 429" in text
    assert (tmp_path / "out" / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_counts_the_most_frequent_reasons_of_failures_and_the_others_together() -> None:
    reasons = ["rare", "often", "often", *(f"HTTP 400: {number} is too much" for number in range(12))]
    lost = (LoadRecord(0.1, error=reason) for reason in reasons)
    found = markdown(LoadResults("", {}, "", [measurement(2.0, FAST, *lost)]))
    lines = [line for line in found.splitlines() if line.startswith("- 2, 4: ")]
    assert lines[:2] == ["- 2, 4: 2 × often", "- 2, 4: 1 × rare"]
    assert lines[10:] == ["- 2, 4: 4 × 4 other reasons, which the JSON names"]


@pytest.mark.parametrize("rates", [(2.0,), (2.0, math.inf)])
def test_the_picture_names_its_axes_and_tells_its_lines_apart(
    rates: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    chart(LoadResults("small at http://server", {}, "pilotfish bench serve", [measurement(rate) for rate in rates]))

    (axes,) = drawn[0].axes
    lines = axes.get_lines()
    assert axes.get_xlabel() and axes.get_ylabel()
    assert len(axes.get_legend_handles_labels()[1]) == len(lines) >= 2
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines)
    seconds = [float(one) for line in lines for one in (line.get_ydata() if len(rates) > 1 else line.get_xdata())]
    low, high = axes.get_ylim() if len(rates) > 1 else axes.get_xlim()
    assert low <= min(seconds) and max(seconds) <= high
    assert low > 0 if len(rates) > 1 else high < 2 * max(seconds)
