"""Runs the command line, and prints when it reaches each stage of a start.

    python -m tests.bench.processes.staged_serve serve --set key=value

A line is `stage SECONDS TEXT`, with the time since the epoch; the text after the last stage is `READY`.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

PREFIX = "stage "
READY = "ready"


class Stages:
    """Takes the place of the status line of the terminal."""

    def __init__(self, stage: str) -> None:
        self._stage = ""
        self.update(stage)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.update(READY)

    def update(self, stage: str) -> None:
        """Print a stage that differs from the last one."""
        name = stage.partition(":")[0]  # what follows says which deployments are ready so far
        if name != self._stage:
            self._stage = name
            sys.stdout.write(f"{PREFIX}{time.time():.3f} {name}\n")
            sys.stdout.flush()


def main() -> None:
    """Run the command line of this process."""
    from deploy.cli import main as run  # importing it is part of the start
    from deploy.terminal import notices

    notices.status = Stages  # type: ignore[method-assign, assignment]
    run()


if __name__ == "__main__":
    main()
