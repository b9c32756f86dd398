"""The objects that the chart renders."""

from __future__ import annotations

import pytest

from tests.support.chart.rendering import CI_VALUES, Rendered, render_ci


@pytest.fixture(params=CI_VALUES)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """The chart, rendered with each file of example values."""
    return render_ci(request.param)
