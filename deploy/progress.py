"""Reports the progress of long work: a bar on a terminal, a line every minute in a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Clock = Callable[[], float]

_LINE_SECONDS = 60.0


class ProgressReporter:
    """Displays the progress of one task. A context manager that the task calls with its progress."""

    def __init__(self, console: Console, title: str, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._next_line = clock() + _LINE_SECONDS
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, done: float, text: str) -> None:
        """Report that the share `done` (0 to 1) is complete. `text` describes the current state."""
        self._bar.update(self._task, completed=done, description=f"{self._title}: {text}")
        if not self._console.is_terminal and (now := self._clock()) >= self._next_line:
            self._next_line = now + _LINE_SECONDS
            self._console.print(f"{self._title}: {done:.0%}, {text}", markup=False)
