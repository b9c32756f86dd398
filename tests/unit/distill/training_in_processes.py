"""Trains a drafter in processes that Ray Train starts, or in one.

Its arguments are the kind, the options as JSON, and a step. The last process dies before that step, once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from deploy.distillation import dspark, eagle3
from deploy.distillation.execute import execute
from workers.distill.device_training import DeviceTraining


class _Dying:
    """Beside the run of a kind: the first process notes that it trains, and the last one may kill itself."""

    def train(self, texts: Any) -> None:
        run: Any = self
        mark, step = Path(str(run.options.out) + ".died"), run.options.dies
        if run.peers.rank == 0:
            with Path(str(run.options.out) + ".begun").open("a") as file:
                file.write("begun\n")
        if step and run.peers.rank == run.peers.count - 1 and not mark.exists():
            original, taken = DeviceTraining._step, 0

            def counted(training: Any, *arguments: Any) -> Any:
                nonlocal taken
                taken += 1
                if taken == step:
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(training, *arguments)

            DeviceTraining._step = counted  # type: ignore[method-assign, assignment]
        super().train(texts)  # type: ignore[misc]


class DyingSpark(_Dying, dspark.Run):
    """Trains a DSpark drafter."""


class DyingHead(_Dying, eagle3.Run):
    """Trains an EAGLE-3 head."""


def main() -> None:
    kind, words, dies = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    chosen = {"dspark": dspark, "eagle3": eagle3}[kind].options(words)
    chosen.dies = dies
    if kind == "dspark":
        execute(DyingSpark, chosen)
    else:
        execute(DyingHead, chosen)


if __name__ == "__main__":
    import tests.unit.distill.training_in_processes as named  # what processes can import

    named.main()
