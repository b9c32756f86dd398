"""The results of a load test: JSON, Markdown tables and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.bench.load_test.records import FIGURES, PERCENTILES, LoadRecord, Measurement
from deploy.bench.report.charts import empty_plot, png
from deploy.bench.report.tables import UNKNOWN, machine_line, markdown_table
from deploy.draft_origins import origin_shares

FORMAT_VERSION = 1
_MOST_REASONS = 10
"""Most reasons of failures that the report names of one measurement. All are in the JSON."""


@dataclass(slots=True)
class LoadResults:
    """The results of a load test."""

    title: str
    machine: Mapping[str, Any]
    """The machine of the client, from `deploy.bench.measuring.setup.describe_machine`."""
    command: str
    measurements: list[Measurement] = field(default_factory=list)
    was_stopped: bool = False
    """Whether Ctrl-C ended it. The last measurement has the requests that had ended by then."""


def markdown(results: LoadResults) -> str:
    """The whole report: what was asked of whom, throughput, latency, failures."""
    parts = [f"# Load test\n\n{results.title}"]
    if results.machine:
        parts.append(f"Client: {machine_line(results.machine)}")
    parts.append(f"## Throughput\n\n{_throughput(results.measurements)}")
    parts.append(f"## Latency in milliseconds\n\n{_latency(results.measurements)}")
    if failures := [line for found in results.measurements for line in _failures(found)]:
        parts.append("## Failed requests\n\n" + "\n".join(failures))
    parts.append(f"Command:\n\n```sh\n{results.command}\n```")
    return "\n\n".join(parts) + "\n"


def _failures(found: Measurement) -> list[str]:
    """A line for each reason for which requests failed, as far as there is room, and one for all others."""
    errors = list(found.errors.items())
    lines = [f"- {_place(found)}: {count} × {reason}" for reason, count in errors[:_MOST_REASONS]]
    if others := errors[_MOST_REASONS:]:
        count = sum(count for _, count in others)
        lines.append(f"- {_place(found)}: {count} × {len(others)} other reasons, which the JSON names")
    return lines


def _throughput(measurements: Sequence[Measurement]) -> str:
    columns = ["requests/s sent, in flight", "answered", "failed", "s", "requests/s", "output tokens/s", "tokens/s"]
    columns += [
        "most in flight",
        "prompt tokens cached",
        "tokens drafted",
        "accepted drafts from",
        "goodput, requests/s",
    ]
    rows = [
        [
            _place(found),
            str(len(found.completed)),
            str(len(found.records) - len(found.completed)),
            f"{found.seconds:.1f}",
            f"{found.per_second(len(found.completed)):.2f}",
            f"{found.per_second(found.output_tokens):.1f}",
            f"{found.per_second(found.prompt_tokens + found.output_tokens):.1f}",
            str(found.most_in_flight),
            UNKNOWN if found.cached_share is None else f"{found.cached_share:.0%}",
            UNKNOWN if found.accepted_share is None else f"{found.accepted_share:.0%}",
            origin_shares(found.accepted_by_origin) or UNKNOWN,
            UNKNOWN if found.goodput is None else f"{found.goodput:.2f}",
        ]
        for found in measurements
    ]
    bounds = measurements[0].goodput_bounds if measurements else {}
    kept = ", ".join(f"{name} ≤ {1e3 * bound:g} ms" for name, bound in bounds.items())
    note = f"\n\nGoodput counts the requests with {kept}." if kept else ""
    return markdown_table(columns, rows) + note


def _latency(measurements: Sequence[Measurement]) -> str:
    columns = ["requests/s sent, in flight", "figure", "mean", *PERCENTILES]
    rows = []
    for found in measurements:
        for name, title in FIGURES.items():
            latency = found.latency(name)
            values = [UNKNOWN] * (1 + len(PERCENTILES))
            if latency is not None:
                values = [f"{1e3 * value:.1f}" for value in latency.values()]
            rows.append([_place(found), title, *values])
    note = (
        "TPOT: time after the first token, per token after it. ITL: between one part of a stream and the next; with "
        "drafts, a part may have several tokens."
    )
    return f"{markdown_table(columns, rows)}\n\n{note}"


def chart(results: LoadResults) -> bytes | None:
    """Percentiles of TTFT and end-to-end latency over the measurements, as a PNG; of one measurement, all requests.

    `None` without matplotlib, which is optional, or without answers.
    """
    measurements = [found for found in results.measurements if found.completed]
    plot = empty_plot((results.title,), "", 7.0) if measurements else None
    if plot is None:
        return None
    figure, axes = plot
    for name in ("ttft", "e2el"):
        if len(measurements) == 1:
            values = sorted(
                value for record in measurements[0].completed if (value := record.figures[name]) is not None
            )
            axes.step(values, [(index + 1) / len(values) for index in range(len(values))], label=FIGURES[name])
            continue
        for percentile in PERCENTILES:
            points = [None if (found := each.latency(name)) is None else found[percentile] for each in measurements]
            style = "o-" if name == "ttft" else "s--"
            axes.plot(range(len(points)), points, style, label=f"{FIGURES[name]}, {percentile}")
    if len(measurements) == 1:
        axes.set(xlabel="seconds", ylabel="share of the requests")
    else:
        axes.set_xticks(range(len(measurements)), [_place(found) for found in measurements])
        axes.set(xlabel="requests/s sent, in flight", ylabel="seconds (logarithmic)", yscale="log")
    return png(figure, axes)


def as_json(results: LoadResults) -> dict[str, Any]:
    """The results as values of JSON: every figure, and every request."""
    return {
        "version": FORMAT_VERSION,
        "title": results.title,
        "machine": dict(results.machine),
        "command": results.command,
        "measurements": [_measurement(found) for found in results.measurements],
    }


def _measurement(found: Measurement) -> dict[str, Any]:
    return {
        "request_rate": None if math.isinf(found.request_rate) else found.request_rate,
        "max_concurrency": found.max_concurrency or None,
        "seconds": found.seconds,
        "completed": len(found.completed),
        "failed": found.errors,
        "prompt_tokens": found.prompt_tokens,
        "output_tokens": found.output_tokens,
        "request_throughput": found.per_second(len(found.completed)),
        "output_throughput": found.per_second(found.output_tokens),
        "total_token_throughput": found.per_second(found.prompt_tokens + found.output_tokens),
        "most_in_flight": found.most_in_flight,
        "cached_prompt_share": found.cached_share,
        "accepted_draft_share": found.accepted_share,
        "accepted_by_origin": found.accepted_by_origin,
        "goodput": found.goodput,
        "goodput_bounds_seconds": dict(found.goodput_bounds),
        "latency_seconds": {name: found.latency(name) for name in FIGURES},
        "requests": [_record(record) for record in found.records],
    }


def _record(record: LoadRecord) -> dict[str, Any]:
    if record.answer is None:
        return {"sent": record.sent_seconds, "error": record.error}
    return {
        "sent": record.sent_seconds,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.answer.completion_tokens,
        "arrivals": [asdict(arrival) for arrival in record.answer.arrivals],
        **record.figures,
    }


def _place(found: Measurement) -> str:
    return f"{found.request_rate:g}, {found.max_concurrency or 'any'}"


def write(results: LoadResults, directory: Path) -> None:
    """Write `serve.json`, `serve.md` and, with matplotlib, `serve.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "serve.json").write_text(json.dumps(as_json(results)), encoding="utf-8")
    (directory / "serve.md").write_text(markdown(results), encoding="utf-8")
    picture = chart(results)
    if picture is not None:
        (directory / "serve.png").write_bytes(picture)
