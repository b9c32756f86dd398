"""What only the start of a process needed is given back, and nothing else."""

from __future__ import annotations

import ctypes
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from workers.kv.start_memory import release_start_memory


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_code_that_ran_is_released_and_runs_again() -> None:
    expected = torch.eye(3).inverse()
    before = resident_file_bytes()
    release_start_memory.__wrapped__()
    assert resident_file_bytes() < before / 2
    assert torch.equal(torch.eye(3).inverse(), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_what_the_loader_or_the_process_changed_is_kept() -> None:
    before = changed_bytes()
    release_start_memory.__wrapped__()
    kept = changed_bytes()
    assert {name for name, size in before.items() if kept.get(name, 0) < size} == set()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_libraries_may_be_loaded_and_code_may_run_meanwhile() -> None:
    stopped = threading.Event()

    def compute() -> float:
        total = 0.0
        while not stopped.is_set():
            total += float(torch.linalg.det(torch.eye(8)))
            ctypes.CDLL("libm.so.6")
        return total

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(compute) for _ in range(2)]
        for _ in range(20):
            release_start_memory.__wrapped__()
        stopped.set()
        assert all(one.result(30) >= 1 for one in running)


def changed_bytes() -> dict[str, int]:
    """Bytes of the process' own in each mapping of a file, by its address and path."""
    found, name = {}, ""
    for line in Path("/proc/self/smaps").read_text("utf-8", "replace").splitlines():
        first, *values = line.split()
        if not first.endswith(":"):
            name = line if len(values) > 4 and values[4].startswith("/") else ""
        elif first == "Anonymous:" and name:
            found[name] = int(values[0])
    return found


def resident_file_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:"))
    return int(line.split()[1]) * 1024
