"""Reads the resources of this machine or container."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy.placement import Resources

logger = logging.getLogger(__name__)

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)
"""Limit, use, statistics and prefix of its names, in versions 2 and 1 of the kernel's control groups."""
_QUERY_SECONDS = 10.0
_TORCH_SECONDS = 120.0
"""Longest wait for a process that imports torch and asks the driver of the GPUs."""
_ASK_TORCH = """
import torch
for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    print(torch.cuda.mem_get_info(index)[0])
"""
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Devices of the drivers of NVIDIA and AMD, and of both under WSL."""


def local_resources() -> Resources:
    """Cores, free memory and visible GPUs. Starts nothing."""
    gpu_memory = _memory_of_gpus() if _may_have_gpus() else []
    return Resources(
        cpus=float(usable_cores(_CONTROL_GROUP)),
        gpus=len(gpu_memory),
        memory_bytes=free_memory(),
        gpu_memory_bytes=min(gpu_memory, default=0),
    )


def _may_have_gpus() -> bool:
    """Whether a driver of GPUs is loaded. Only Linux tells without torch."""
    return sys.platform != "linux" or any(Path(device).exists() for device in _GPU_DEVICES)


def _memory_of_gpus(program: str = _ASK_TORCH) -> list[int]:
    """Free memory of each visible GPU, in bytes, as `program` prints it. Empty if it fails, which is logged.

    It runs in a process of its own: who asks a GPU holds some of its memory until its end, and on a GPU for one process
    at a time nobody else could compute.
    """
    try:
        printed = subprocess.run(  # noqa: S603
            [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=_TORCH_SECONDS
        ).stdout
        return [int(line) for line in printed.split()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines() or [repr(error)]
        logger.warning("the GPUs of this machine cannot be counted, so none is used: %s", said[-1])
        return []


def free_memory() -> int:
    """Free main memory of this machine or container, in bytes."""
    return min(int(psutil.virtual_memory().available), free_memory_limit(_CONTROL_GROUP))


def free_gpu_memory() -> list[int]:
    """Free memory of each GPU, in bytes; empty without a GPU or its driver's `nvidia-smi`.

    Unlike torch, it also sees GPUs that are hidden from this process.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        query = [command, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        printed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_QUERY_SECONDS).stdout  # noqa: S603
        return [int(line) << 20 for line in printed.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def usable_cores(control_group: Path) -> int:
    """Number of cores that this process may use: its affinity, limited by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(control_group / "cpu.max").partition(" ")
    if not quota:  # version 1 of the kernel's control groups
        quota, period = (_read(control_group / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota.isdigit() and period.isdigit() and int(period):
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def free_memory_limit(control_group: Path) -> int:
    """Bytes below the container's memory limit; a very large number if there is no limit."""
    found = _container_memory(control_group)
    return 1 << 62 if found is None else max(0, found.limit - found.used)


def used_memory_share(control_group: Path = _CONTROL_GROUP) -> float:
    """The share of the container's memory limit that is in use, or of the machine's memory without a limit: 0 to 1.

    What the kernel can take back at once, such as files that it keeps in memory, is not in use.
    """
    found = _container_memory(control_group)
    if found is not None:
        return max(0, found.used - found.files) / found.limit
    memory = psutil.virtual_memory()
    return 1 - memory.available / memory.total


@dataclass(frozen=True, slots=True)
class _ContainerMemory:
    """What the kernel counts of a container with a memory limit, in bytes."""

    limit: int
    used: int
    files: int
    """The part of `used` that holds files, which the kernel can take back."""


def _container_memory(control_group: Path) -> _ContainerMemory | None:
    """Read the memory of the container; `None` without a limit below the machine's memory."""
    for limit_file, used_file, statistics, prefix in _MEMORY_FILES:
        limit, used = _read(control_group / limit_file), _read(control_group / used_file)
        if limit.isdigit() and used.isdigit() and 0 < int(limit) < psutil.virtual_memory().total:
            lines = _read(control_group / statistics).splitlines()
            counts = dict(line.split(" ", 1) for line in lines if " " in line)
            files = sum(int(counts.get(f"{prefix}{name}", "0")) for name in ("active_file", "inactive_file"))
            return _ContainerMemory(int(limit), int(used), files)
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii").strip()
    except OSError:
        return ""
