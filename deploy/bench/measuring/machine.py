"""The machine that a benchmark runs on, and the memory of its process."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

_VERSIONS = ("pilotfish", "torch", "transformers", "grpcio", "ray")


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def describe_machine() -> dict[str, Any]:
    """Processor, cores, threads, memory, GPUs, versions and the time (UTC)."""
    # Importing torch takes more than a second. Who reads results needs none.
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": gpus,
        "load": [round(value, 2) for value in os.getloadavg()],
        "versions": {name: version(name) for name in _VERSIONS} | {"python": platform.python_version()},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
