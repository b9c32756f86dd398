"""What processes use during a pass."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.core.errors import ConfigurationError
from deploy.bench.contestants.answers import ResourceUse
from deploy.bench.measuring.meter import EnergyCounters, ResourceMeter, gpu_joules
from deploy.bench.measuring.results import joined_use

NO_LIBRARY = "libno-such-library.so"


def test_this_process_is_measured(tmp_path: Path) -> None:
    meter = ResourceMeter(energy=EnergyCounters(tmp_path, NO_LIBRARY))
    begun = meter.start()
    sum(range(2_000_000))
    found = meter.stop(begun)
    assert found.cpu_seconds is not None and found.cpu_seconds > 0 and found.joules is None
    assert any(name.endswith(f" {os.getpid()}") and most > 1 << 20 for name, most in found.peak_bytes.items())


def test_a_process_that_does_not_run_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--server-pid: needed the id of a running process"):
        ResourceMeter([2**22 + 1])


def test_energy_of_packages_is_added_up_and_their_parts_are_not_counted_twice(tmp_path: Path) -> None:
    for name, microjoules in (("intel-rapl:0", 5_000_000), ("intel-rapl:1", 2_000_000), ("intel-rapl:0:0", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{microjoules}\n")
    counters = EnergyCounters(tmp_path, NO_LIBRARY)
    begun = counters.joules()
    assert begun == {"intel-rapl:0": 5.0, "intel-rapl:1": 2.0}
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("6500000\n")
    assert counters.since(begun) == pytest.approx(1.5)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("10\n")
    assert counters.since(begun) is None  # the counter began anew


class Driver:
    """The calls of NVML that count energy. The second GPU counts none."""

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802 - NVML's name
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:  # noqa: N802
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, millijoules: Any) -> int:  # noqa: N802
        millijoules._obj.value = 2500
        return 0 if device.value == 1 else 3


def test_energy_of_gpus_is_read_where_they_count_it() -> None:
    assert gpu_joules(cast(ctypes.CDLL, Driver())) == {"gpu:0": 2.5}
    assert gpu_joules(None) == {}


def test_joined_passes_add_times_and_keep_the_largest_peaks() -> None:
    one, other = ResourceUse(1.0, {"a": 3}, 2.0), ResourceUse(2.0, {"a": 1, "b": 5}, None)
    assert joined_use([one, other]) == ResourceUse(3.0, {"a": 3, "b": 5}, None)
    assert joined_use([]) == ResourceUse()
