"""The roofline of an evaluation: where each competitor is between reading memory and arithmetic (Williams et al. 2009).

A point is what all passes of a competitor computed and read, prompts included. The roof is what the device reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.bench.evaluation.evaluation import Evaluation
from deploy.bench.evaluation.token_costs import token_costs
from deploy.bench.report.charts import empty_plot, png

_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Point:
    """One competitor at one batch."""

    name: str
    intensity: float
    """Floating-point operations per byte that is read."""
    flops_per_second: float


def points(evaluation: Evaluation) -> list[Point]:
    """A point for each competitor and batch, at the first temperature. Those with unknown arithmetic have none."""
    found: list[Point] = []
    settings = evaluation.settings
    for batch, temperature in settings:
        if temperature != settings[0][1]:
            continue
        for line in evaluation.lines(batch, temperature):
            costs = token_costs(line.cost, line.passes)
            if costs.intensity is not None and costs.flops_per_second is not None:
                found.append(Point(f"{line.name}, batch {batch}", costs.intensity, costs.flops_per_second))
    return found


def roofline(evaluation: Evaluation) -> bytes | None:
    """The picture as a PNG; `None` without matplotlib, which is optional, without points or without a roof."""
    found, roofs = points(evaluation), evaluation.roofs
    if not found or roofs is None:
        return None
    results = evaluation.results
    plot = empty_plot((results.title, results.stretch), "arithmetic intensity and attained speed", 8.0)
    if plot is None:
        return None
    figure, axes = plot
    ridge = roofs.flops_per_second / roofs.bytes_per_second
    least = min(0.1 * ridge, *(0.5 * point.intensity for point in found))
    most = max(10 * ridge, *(2 * point.intensity for point in found))
    axes.plot(
        [least, ridge, most],
        [least * roofs.bytes_per_second / _GIGA, roofs.flops_per_second / _GIGA, roofs.flops_per_second / _GIGA],
        "k--",
        label="roof: reading memory, then multiplying matrices",
    )
    for point in found:
        axes.plot([point.intensity], [point.flops_per_second / _GIGA], "o", label=point.name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("floating-point operations per byte that is read")
    axes.set_ylabel("GFLOP/s")
    return png(figure, axes)
