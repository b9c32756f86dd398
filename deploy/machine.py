"""Reads the resources of this machine or container."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from deploy.placement import Resources

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_QUERY_SECONDS = 10.0
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


def _memory_of_gpus() -> list[int]:
    """Free memory of each visible GPU, in bytes."""
    # Importing torch takes seconds, and most commands do not need it.
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [int(torch.cuda.mem_get_info(index)[0]) for index in range(gpus)]


def free_memory() -> int:
    """Free main memory of this machine or container, in bytes."""
    return min(int(psutil.virtual_memory().available), free_memory_limit(_CONTROL_GROUP))


def free_gpu_memory() -> int:
    """Free memory of the GPU with the least free memory, in bytes; 0 without a GPU or its driver's `nvidia-smi`.

    Unlike torch, it also sees GPUs that are hidden from this process.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        query = [command, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        printed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_QUERY_SECONDS).stdout  # noqa: S603
        return min((int(line) << 20 for line in printed.split()), default=0)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def usable_cores(control_group: Path) -> int:
    """Number of cores that this process may use: its affinity, limited by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(control_group / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def free_memory_limit(control_group: Path) -> int:
    """Bytes below the container's memory limit; a very large number if there is no limit."""
    limit, used = _read(control_group / "memory.max"), _read(control_group / "memory.current")
    return max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else 1 << 62


def used_memory_share(control_group: Path = _CONTROL_GROUP) -> float:
    """The share of the memory of this machine or container that is in use, the larger of both: 0 to 1.

    What the kernel can take back at once, such as files that it keeps in memory, is not in use.
    """
    memory = psutil.virtual_memory()
    return max(1 - memory.available / memory.total, _used_limit_share(control_group))


def _used_limit_share(control_group: Path) -> float:
    """The used share of the container's memory limit; 0 without a limit."""
    limit, used = _read(control_group / "memory.max"), _read(control_group / "memory.current")
    if not (limit.isdigit() and used.isdigit() and int(limit)):
        return 0.0
    counts = dict(line.split(" ", 1) for line in _read(control_group / "memory.stat").splitlines() if " " in line)
    files = sum(int(counts.get(name, "0")) for name in ("active_file", "inactive_file"))
    return max(0, int(used) - files) / int(limit)


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii").strip()
    except OSError:
        return ""
