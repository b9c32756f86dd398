"""Plots as PNG files, which need no display, but matplotlib, which is optional; among them those of a race."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from typing import Any

from deploy.bench.measuring import measures
from deploy.bench.measuring.results import PLAIN, BenchResults, over_tasks, plain_passes

_DISTINCT = ("tab10", "Dark2")
"""Palettes of matplotlib, used one after the other: together 18 colours, none of which is a shade of its neighbour."""

_DECADE = 10.0

_COLUMN_INCHES = 2.2
"""Width of a column of the legend."""
_ROW_INCHES = 0.15
"""Height of a line of the legend."""


def empty_plot(about: Sequence[str], title: str, width: float) -> tuple[Any, Any] | None:
    """An empty figure and its axes, with what was measured above the title; `None` without matplotlib."""
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=[color for name in _DISTINCT for color in map(colormaps[name], range(colormaps[name].N))])
    axes.set_title("\n".join(filter(None, (*about, title))), fontsize=8, wrap=True)
    return figure, axes


def png(figure: Any, axes: Any) -> bytes:
    """The figure with a legend below what is drawn, as a PNG. Ticks are plain numbers."""
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter("{x:g}")
            low, high = axis.get_view_interval()
            axis.set_minor_formatter("{x:g}" if high < _DECADE * low else "")
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, int(figure.get_figwidth() / _COLUMN_INCHES))
    figure.set_figheight(figure.get_figheight() + _ROW_INCHES * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=7)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, metadata={"Software": None})
    return picture.getvalue()


_WIDTH = 0.8
"""Width of all bars of a task together, in units of the distance between two tasks."""


def speedup_by_task(results: BenchResults) -> bytes | None:
    """Bars of ÷ plain for each task and competitor, at the first batch and temperature, as a PNG.

    `None` without matplotlib, which is optional, or without ratios.
    """
    cells = [found.cell for found in results.cells if found.passes and found.plain]
    if not cells:
        return None
    first = cells[0]
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    heights = {
        entry.name: [_ratio(results, entry.name, task, first.batch, first.temperature) for task in tasks]
        for entry in results.entries
    }
    bars = {name: values for name, values in heights.items() if any(value is not None for value in values)}
    title = f"÷ plain decoding, batch {first.batch}, temperature {first.temperature:g}"
    plot = empty_plot((results.title, results.stretch), title, max(7.0, 0.25 * len(tasks) * len(bars) + 3))
    if plot is None:
        return None
    figure, axes = plot
    width = _WIDTH / max(1, len(bars))
    for index, (name, values) in enumerate(bars.items()):
        places = [place - _WIDTH / 2 + (index + 0.5) * width for place in range(len(tasks))]
        drawn = axes.bar(
            places, [0.0 if value is None else value - 1.0 for value in values], width, bottom=1.0, label=name
        )
        axes.bar_label(drawn, ["" if value is None else f"{value:.2f}" for value in values], fontsize=6, padding=1)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks, rotation=20, ha="right")
    axes.set(xlabel="task", ylabel="speed ÷ plain decoding")
    axes.margins(y=0.1)
    return png(figure, axes)


def throughput_by_batch(results: BenchResults) -> bytes | None:
    """Lines of tokens per second over the batch, all tasks in turn, at the first temperature, as a PNG.

    `None` without matplotlib, which is optional, or without measurements.
    """
    measured = [found.cell for found in results.cells if found.passes]
    if not measured:
        return None
    temperature = measured[0].temperature
    batches = sorted({cell.batch for cell in measured})
    plot = empty_plot((results.title, results.stretch), f"tokens per second, temperature {temperature:g}", 7.0)
    if plot is None:
        return None
    figure, axes = plot
    lines = {
        entry.name: [over_tasks(results.of(entry.name, batch=batch, temperature=temperature))[1] for batch in batches]
        for entry in results.entries
    }
    lines[PLAIN] = [plain_passes(results, batch, temperature) for batch in batches]
    for name, passes in lines.items():
        known = [(batch, found) for batch, found in zip(batches, passes, strict=True) if found]
        rates = [statistics.median(one.rate for one in found) for _, found in known]
        style = "k--" if name == PLAIN else "o-"
        axes.plot([batch for batch, _ in known], rates, style, label=name)
    axes.set(xlabel="requests in flight (logarithmic)", ylabel="tokens per second (logarithmic)")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(batches)
    axes.set_xticks([], minor=True)
    return png(figure, axes)


def _ratio(results: BenchResults, name: str, task: str, batch: int, temperature: float) -> float | None:
    found = results.of(name, task=task, batch=batch, temperature=temperature)
    ratios: Sequence[float] = measures.speed_ratios(*over_tasks(found)) if found else ()
    return statistics.median(ratios) if ratios else None
