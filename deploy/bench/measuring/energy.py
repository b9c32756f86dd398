"""Energy counters: those of processor packages (RAPL), and those of NVIDIA GPUs (NVML)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_PACKAGES = Path("/sys/class/powercap")
_LIBRARY = "libnvidia-ml.so.1"
_MICRO, _MILLI = 1e-6, 1e-3


class EnergyCounters:
    """Reads every energy counter that this user may read. Without any, energy is unknown."""

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
