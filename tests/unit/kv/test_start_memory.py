"""What only the start of a process needed is given back, and nothing else."""

from __future__ import annotations

import ctypes
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from workers.kv.start_memory import release_code, unchanged_code

MAPS = """\
1000-3000 r-xp 00000000 08:01 7 /usr/lib/library.so
Anonymous:             0 kB
Swap:                  0 kB
3000-4000 r--p 00002000 08:01 7 /usr/lib/library.so
Anonymous:             4 kB
Swap:                  0 kB
4000-5000 rw-p 00003000 08:01 7 /usr/lib/library.so
Anonymous:             0 kB
Swap:                  0 kB
5000-6000 r--p 00004000 08:01 7 /usr/lib/library.so
Anonymous:             0 kB
Swap:                  4 kB
6000-7000 r--p 00000000 00:00 0 [vvar]
Anonymous:             0 kB
Swap:                  0 kB
7000-8000 r--p 00000000 08:01 9 /models/model.safetensors
Anonymous:             0 kB
Swap:                  0 kB
8000-9000 r--p 00000000 08:01 8 /a name with spaces.so.1
Anonymous:             0 kB
Swap:                  0 kB
"""


def test_only_pages_of_libraries_that_nothing_has_changed_are_given_back() -> None:
    assert [(begin, size) for begin, size, _ in unchanged_code(MAPS)] == [(0x1000, 0x2000)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_code_that_ran_is_released_and_runs_again() -> None:
    expected = torch.eye(3).inverse()
    before = resident_file_bytes()
    release_code()
    assert resident_file_bytes() < before / 2
    assert torch.equal(torch.eye(3).inverse(), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_what_the_loader_or_the_process_changed_is_kept() -> None:
    before = changed_bytes()
    release_code()
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
        for _ in range(2):
            release_code()
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
