"""Measures what processes use during a pass: CPU time, peak memory, and the energy that devices report."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.core.errors import ConfigurationError
from deploy.bench.contestants.answers import ResourceUse

_PROC = Path("/proc")
_RESET_PEAK = "5"
"""Written to `clear_refs`, it sets a process's peak of resident memory to the present value (proc(5))."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at the start of a pass."""

    cpu_seconds: Mapping[int, float]
    """CPU time of each process since its start, by process id."""
    energy: Mapping[str, float]
    """Joules of each device since some moment."""


class ResourceMeter:
    """Measures processes and those that they started."""

    def __init__(self, process_ids: Sequence[int] = (), energy: EnergyCounters | None = None) -> None:
        """Measures this process, or those with the given ids. Raises `ConfigurationError` for one that does not run."""
        try:
            self._roots = [psutil.Process(number) for number in process_ids] or [psutil.Process()]
        except (psutil.Error, ValueError) as error:
            raise ConfigurationError(f"--server-pid: needed the id of a running process; {error}") from None
        self._energy = EnergyCounters() if energy is None else energy

    def start(self) -> Reading:
        """Begin a measurement."""
        processes = self._processes()
        for process in processes:
            with suppress(OSError):  # without it, the peak is that since the process's start
                (_PROC / str(process.pid) / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
        return Reading({process.pid: _cpu_seconds(process) for process in processes}, self._energy.joules())

    def stop(self, begun: Reading) -> ResourceUse:
        """End the measurement that `start` began."""
        cpu = 0.0
        peaks: dict[str, int] = {}
        for process in self._processes():
            with suppress(psutil.Error):
                cpu += max(0.0, _cpu_seconds(process) - begun.cpu_seconds.get(process.pid, 0.0))
                peaks[f"{process.name()} {process.pid}"] = _peak_bytes(process)
        return ResourceUse(cpu, peaks, self._energy.since(begun.energy))

    def _processes(self) -> list[psutil.Process]:
        found: dict[int, psutil.Process] = {}
        for root in self._roots:
            with suppress(psutil.Error):
                for process in (root, *root.children(recursive=True)):
                    found[process.pid] = process
        return list(found.values())


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended
        return 0.0
    return float(times.user + times.system)


def _peak_bytes(process: psutil.Process) -> int:
    """Peak resident memory (`VmHWM`), or the present one where the system does not report it."""
    with suppress(OSError):
        for line in (_PROC / str(process.pid) / "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(process.memory_info().rss)


_PACKAGES = Path("/sys/class/powercap")
_LIBRARY = "libnvidia-ml.so.1"
_MICRO, _MILLI = 1e-6, 1e-3


class EnergyCounters:
    """The energy counters that this user may read: of processor packages (RAPL) and NVIDIA GPUs (NVML)."""

    def __init__(self, packages: Path = _PACKAGES, library: str = _LIBRARY) -> None:
        self._packages = packages
        self._nvml = _load(library)

    def joules(self) -> dict[str, float]:
        """The counters by device, in joules since some moment. Virtual machines mostly have none."""
        return {**_package_joules(self._packages), **gpu_joules(self._nvml)}

    def since(self, begun: Mapping[str, float]) -> float | None:
        """Joules of all devices since `begun` was read; `None` without a counter, or if one began anew."""
        now = self.joules()
        used = [now[name] - value for name, value in begun.items() if name in now]
        return sum(used) if used and min(used) >= 0 else None


def _package_joules(packages: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for package in sorted(packages.glob("intel-rapl:*")):
        if package.name.count(":") == 1:  # deeper ones are parts of a package
            with suppress(OSError, ValueError):
                found[package.name] = int((package / "energy_uj").read_text(encoding="ascii")) * _MICRO
    return found


def _load(library: str) -> ctypes.CDLL | None:
    """NVML, initialized; `None` without an NVIDIA driver."""
    try:
        nvml = ctypes.CDLL(library)
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def gpu_joules(nvml: ctypes.CDLL | None) -> dict[str, float]:
    """Joules of each GPU since the driver was loaded; empty without NVML."""
    if nvml is None:
        return {}
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return {}
    found: dict[str, float] = {}
    for index in range(count.value):
        device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)) == 0:
            found[f"gpu:{index}"] = millijoules.value * _MILLI
    return found
