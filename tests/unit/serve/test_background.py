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
