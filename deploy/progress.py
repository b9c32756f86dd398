"""Reports the progress of long work: a bar on a terminal, a line every minute in a file."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Clock = Callable[[], float]

_LINE_SECONDS = 60.0
_RECENT_SECONDS = 30.0


class TimeLeft:
    """Estimates how long work still takes: at the speed of the last half minute, but never beyond its bound."""

    def __init__(self, now: float, seconds: float) -> None:
        """`now` is the time at which the work begins, `seconds` the longest that it may take, which may be infinite."""
        self._ends = now + seconds
        self._reports: deque[tuple[float, float]] = deque()
        """When a larger share was reported, and the share: in the last half minute, and one before; at least two."""

    def report(self, now: float, done: float) -> None:
        """Note that the share `done` (0 to 1) is complete. Work that goes on after an interruption begins above 0."""
        if not self._reports or done > self._reports[-1][1]:
            self._reports.append((now, done))
        while len(self._reports) > 2 and self._reports[1][0] <= now - _RECENT_SECONDS:
            self._reports.popleft()

    def seconds(self, now: float) -> float | None:
        """Seconds that are left; `None` while nothing tells."""
        left = math.inf
        if len(self._reports) > 1:
            (begun, first), (_, last) = self._reports[0], self._reports[-1]
            left = (1 - last) * max(0.0, now - begun) / (last - first)
        left = min(left, max(0.0, self._ends - now))
        return None if math.isinf(left) else left


class ProgressReporter:
    """Displays the progress of one task. A context manager that the task calls with its progress."""

    def __init__(
        self, console: Console, title: str, clock: Clock = time.monotonic, *, seconds: float = math.inf
    ) -> None:
        """`seconds` is the longest time that the task may take."""
        self._console = console
        self._title = title
        self._clock = clock
        begun = clock()
        self._next_line = begun + _LINE_SECONDS
        self._left = TimeLeft(begun, seconds)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=1.0, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: float, text: str) -> None:
        """Report that the share `done` is complete; above 1, the work ends late. `text` describes the current state."""
        now, done = self._clock(), min(1.0, done)
        self._left.report(now, done)
        left = _in_words(self._left.seconds(now))
        self._bar.update(self._task, completed=done, description=f"{self._title}: {text}", left=left)
        if not self._console.is_terminal and now >= self._next_line:
            self._next_line = now + _LINE_SECONDS
            self._console.print(", ".join(filter(None, (f"{self._title}: {done:.0%}", text, left))), markup=False)


def _in_words(seconds: float | None) -> str:
    """The time that is left, as in `1:02:03 left`; empty where it is unknown."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}") + " left"
