"""The learner's process: reads a task, trains a copy of the weights, measures both, writes the candidate and ends.

With the argument `idle` it computes only where nobody else wants to. Its parent stops it with SIGSTOP while requests
run. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_SIGNAL_AFTER_PARENT = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""
_LOWEST_PRIORITY = 19


def main() -> None:
    """Read a task from standard input, a file, and write the candidate to standard output.

    The argument is `idle`, or `normal` for the priority of its parent.
    """
    ctypes.CDLL(None).prctl(_SIGNAL_AFTER_PARENT, signal.SIGKILL)
    with suppress(OSError):
        # Where memory is short, the kernel ends this process before any that serves.
        Path("/proc/self/oom_score_adj").write_text("1000")
    if sys.argv[1] == "idle":
        os.nice(_LOWEST_PRIORITY)
        with suppress(OSError):  # of a sandbox without it
            # Ray gives its workers a low priority too. This one yields to them at once.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # All this comes first: the libraries take seconds, and the parent may stop this process meanwhile, or be killed.
    from deploy.distillation.learner_task import run

    run()


if __name__ == "__main__":
    main()
