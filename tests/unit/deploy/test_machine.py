"""What a machine has is found without libraries that take seconds to load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deploy import machine

_LOADED = """
import sys
from deploy.machine import local_resources
local_resources()
raise SystemExit('torch' in sys.modules)
"""


@pytest.mark.skipif(machine._may_have_gpus(), reason="needs a machine without drivers of GPUs")
def test_torch_is_not_loaded_where_no_driver_of_gpus_is() -> None:
    assert subprocess.run([sys.executable, "-c", _LOADED], check=False).returncode == 0


_GPUS = """
import os
print(os.getpid())
print(7 << 30)
"""


def test_gpus_are_asked_by_a_process_that_ends(caplog: pytest.LogCaptureFixture) -> None:
    """A process that asks a GPU holds some of its memory until it ends, and this one may run for days."""
    process, memory = machine._memory_of_gpus(_GPUS)
    assert process != os.getpid()
    assert not psutil.pid_exists(process)
    assert memory == 7 << 30
    assert machine._memory_of_gpus("raise SystemExit('no driver')") == []
    assert "no driver" in caplog.text


def test_gpus_are_counted_where_a_driver_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_GPU_DEVICES", (str(tmp_path),))
    monkeypatch.setattr(machine, "_memory_of_gpus", lambda: [7, 5])
    found = machine.local_resources()
    assert (found.gpus, found.gpu_memory_bytes) == (2, 5)
