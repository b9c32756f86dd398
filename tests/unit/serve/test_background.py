"""Processes in the background leave others their core when they wake; what computes does so itself no more."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from workers.serve.node import compute_without_interruption, in_background

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")

_POLICY = "import os; raise SystemExit(os.sched_getscheduler(0))"
_NICENESS = """
import os, threading
from workers.serve.node import compute_without_interruption

os.nice(7)
resting = threading.Event()
other = threading.Thread(target=resting.wait)
other.start()
try:
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1)
    wanted = os.getpriority(os.PRIO_PROCESS, os.getppid())
except PermissionError:
    wanted = os.getpriority(os.PRIO_PROCESS, 0)
compute_without_interruption()
found = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}
resting.set()
raise SystemExit(found != {wanted})
"""
"""A program with a higher niceness than its parent, as Ray's workers have. It exits with 0 if all of its threads get
the parent's niceness, where the system permits that."""


def policy_of_a_child() -> int:
    return subprocess.run([sys.executable, "-c", _POLICY], check=False).returncode


def test_processes_started_inside_are_in_the_background_and_later_ones_are_not() -> None:
    with in_background():
        assert policy_of_a_child() == os.SCHED_BATCH
    assert policy_of_a_child() == os.SCHED_OTHER


def test_a_process_that_computes_leaves_the_background_with_all_its_threads() -> None:
    found: list[int] = []
    begun, left = threading.Event(), threading.Event()

    def wait() -> None:
        found.append(os.sched_getscheduler(0))
        begun.set()
        left.wait()
        found.append(os.sched_getscheduler(0))

    with in_background():
        other = threading.Thread(target=wait)
        other.start()
        begun.wait()
        compute_without_interruption()
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    left.set()
    other.join()
    assert found == [os.SCHED_BATCH, os.SCHED_OTHER]


def test_a_process_that_computes_is_as_nice_as_the_one_that_started_it_if_that_is_permitted() -> None:
    assert subprocess.run([sys.executable, "-c", _NICENESS], check=False).returncode == 0
