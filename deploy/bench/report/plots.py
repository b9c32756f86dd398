"""Plots without a display, as PNG files. They need matplotlib, which is optional."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any


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
    axes.set_prop_cycle(color=[colormaps["tab20"](index) for index in range(20)])
    axes.set_title("\n".join(filter(None, (*about, title))), fontsize=8, wrap=True)
    return figure, axes


def png(figure: Any, axes: Any) -> bytes:
    """The figure with a legend, as a PNG."""
    axes.legend(fontsize=7)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, metadata={"Software": None})
    return picture.getvalue()
