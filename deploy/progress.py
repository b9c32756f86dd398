"""A bar where someone watches, a line a minute where a file does."""

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
    """How far one piece of work has come. A context manager; the work calls it as it goes."""

    def __init__(self, console: Console, what: str, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._what = what
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
        self._task = self._bar.add_task(what, total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, done: float, text: str) -> None:
        """`done` of it, between 0 and 1; `text` says it in words."""
        self._bar.update(self._task, completed=done, description=f"{self._what}: {text}")
        if not self._console.is_terminal and (now := self._clock()) >= self._next_line:
            self._next_line = now + _LINE_SECONDS
            self._console.print(f"{self._what}: {done:.0%}, {text}", markup=False)
