"""What only the start of a process needed is given back, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from workers.kv.huge_pages import _clean_file_pages, release_start_memory

MAPS = """\
1000-3000 r-xp 00000000 08:01 7 /usr/lib/library.so
Rss:                   8 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
3000-4000 r--p 00002000 08:01 7 /usr/lib/library.so
Anonymous:             4 kB
4000-5000 rw-p 00003000 08:01 7 /usr/lib/library.so
Anonymous:             0 kB
5000-6000 rw-p 00000000 00:00 0
Anonymous:             0 kB
6000-7000 r--p 00000000 00:00 0 [vvar]
Anonymous:             0 kB
7000-9000 r--p 00000000 08:01 8 /a name with spaces.so (deleted)
Anonymous:             0 kB
"""


def test_pages_that_the_process_may_have_changed_are_kept() -> None:
    assert list(_clean_file_pages(MAPS)) == [(0x1000, 0x2000), (0x7000, 0x2000)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_code_that_ran_is_released_and_runs_again() -> None:
    expected = torch.eye(3).inverse()
    before = resident_file_bytes()
    release_start_memory.__wrapped__()
    assert resident_file_bytes() < before / 2
    assert torch.equal(torch.eye(3).inverse(), expected)


def resident_file_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:"))
    return int(line.split()[1]) * 1024
