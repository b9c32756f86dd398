"""Trains a drafter in processes that Ray Train starts, or in one.

Its arguments are the options as JSON, and a step. The second process dies before that step, once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from deploy.distillation import dspark
from workers.distill.device_training import DeviceTraining


class DyingRun(dspark.Run):
    """The run of a process that may be killed by itself."""

    def train(self, texts: Any) -> None:
        mark, step = Path(str(self.options.out) + ".died"), self.options.dies
        if step and self.peers.rank == 1 and not mark.exists():
            original, taken = DeviceTraining._step, 0

            def counted(training: Any, *arguments: Any) -> Any:
                nonlocal taken
                taken += 1
                if taken == step:
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(training, *arguments)

            DeviceTraining._step = counted  # type: ignore[method-assign]
        super().train(texts)


def main() -> None:
    words, dies = json.loads(sys.argv[1]), int(sys.argv[2])
    chosen = dspark.options(words)
    chosen.dies = dies
    dspark.Run = DyingRun  # type: ignore[misc]
    dspark.execute(chosen)


if __name__ == "__main__":
    import tests.unit.distill.dspark.training_in_processes as named  # what processes can import

    named.main()
