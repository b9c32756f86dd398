"""Long work reports its progress: a line per minute in a file, a bar on a terminal."""

from __future__ import annotations

import io
from itertools import count

from rich.console import Console

from deploy.progress import ProgressReporter


def test_a_file_gets_one_line_per_minute() -> None:
    file = io.StringIO()
    ticks = count(step=25)

    with ProgressReporter(Console(file=file), "training", clock=lambda: float(next(ticks))) as reporter:
        for step in range(6):  # at 25, 50, … 150 seconds
            reporter(step / 6, f"step {step}")

    assert file.getvalue().splitlines() == ["training: 33%, step 2", "training: 83%, step 5"]


def test_a_terminal_shows_a_bar() -> None:
    file = io.StringIO()

    with ProgressReporter(Console(file=file, force_terminal=True, width=80), "training") as reporter:
        reporter(0.5, "step 7")

    assert "50%" in file.getvalue()
    assert "training: step 7" in file.getvalue()
