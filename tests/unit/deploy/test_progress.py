"""Long work reports its progress: a line per minute in a file, a bar on a terminal."""

from __future__ import annotations

import io
from itertools import count

import pytest
from rich.console import Console

from deploy.progress import ProgressReporter, TimeLeft


def test_a_file_gets_one_line_per_minute() -> None:
    file = io.StringIO()
    ticks = count(step=25)

    with ProgressReporter(Console(file=file), "training", clock=lambda: float(next(ticks))) as reporter:
        for step in range(6):  # at 25, 50, … 150 seconds
            reporter(step / 6, f"step {step}")

    assert file.getvalue().splitlines() == ["training: 33%, step 2, 1:40 left", "training: 83%, step 5, 0:25 left"]


def test_work_that_ends_late_is_complete_and_has_no_time_left() -> None:
    file = io.StringIO()
    ticks = count(step=50)

    with ProgressReporter(Console(file=file), "training", clock=lambda: float(next(ticks)), seconds=30) as reporter:
        reporter(0.2, "step 1")
        reporter(2.06, "step 2")

    assert file.getvalue().splitlines() == ["training: 100%, step 2, 0:00 left"]


def test_a_terminal_shows_a_bar() -> None:
    file = io.StringIO()

    with ProgressReporter(Console(file=file, force_terminal=True, width=80), "training") as reporter:
        reporter(0.5, "step 7")

    assert "50%" in file.getvalue()
    assert "training: step 7" in file.getvalue()


def test_the_time_left_is_never_beyond_the_bound() -> None:
    left = TimeLeft(0.0, 90.0)
    assert left.seconds(0.0) == 90.0
    left.report(1.0, 0.0)
    left.report(21.0, 0.001)  # at this speed, more than five hours
    assert left.seconds(30.0) == 60.0
    assert left.seconds(100.0) == 0.0


def test_the_time_left_follows_the_speed_of_the_last_half_minute() -> None:
    left = TimeLeft(0.0, float("inf"))
    left.report(0.0, 0.0)
    left.report(1000.0, 0.5)  # it began slowly
    for second in range(1001, 1041):
        left.report(float(second), 0.5 + 0.01 * (second - 1000))
    assert left.seconds(1040.0) == pytest.approx(10.0)


def test_work_that_reports_less_often_than_every_half_minute_has_an_estimate_all_the_same() -> None:
    left = TimeLeft(0.0, float("inf"))
    left.report(0.0, 0.0)
    assert left.seconds(50.0) is None
    left.report(100.0, 0.25)
    left.report(200.0, 0.5)
    assert left.seconds(200.0) == pytest.approx(200.0)


def test_work_that_goes_on_after_an_interruption_does_not_count_what_was_done_before() -> None:
    left = TimeLeft(0.0, float("inf"))
    left.report(5.0, 0.8)
    left.report(15.0, 0.9)
    assert left.seconds(15.0) == pytest.approx(10.0)


def test_a_bounded_task_shows_at_most_its_bound_on_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)

    with ProgressReporter(console, "answers", lambda: 0.0, seconds=90) as reporter:
        reporter(0.0, "0 tokens")

    assert "1:30 left" in file.getvalue() and "-:--:--" not in file.getvalue()
