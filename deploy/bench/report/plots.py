"""Plots without a display, as PNG files. They need matplotlib, which is optional."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

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
