"""What a running `pilotfish serve` reports: the coordinator's histograms, and the CPU time of its processes by role."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

ROLES = {
    "ray::FirstRank": "target",
    "ray::ServeReplica:pilotfish:Target": "coordinator",
    "ray::ServeReplica:pilotfish:Draft": "drafter",
    "ray::ServeReplica:pilotfish:Ingress": "ingress",
    "ray::ProxyActor": "Serve's proxy",
}
"""Roles by the titles of their processes. All others count as Ray's."""


def histograms(url: str) -> dict[str, tuple[float, float]]:
    """Sum and count of the coordinator's histograms, by name without prefix and unit."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60.0).text):
        for sample in family.samples:
            name, _, part = sample.name.rpartition("_")
            if part in ("sum", "count"):
                found[name.removeprefix("pilotfish:").removesuffix("_seconds")][part] = sample.value
    return {name: (values.get("sum", 0.0), values.get("count", 0.0)) for name, values in found.items()}


def cpu_seconds(pid: int, roles: Mapping[str, str] = ROLES) -> dict[str, float]:
    """CPU seconds of all processes of the cluster so far, by role, without the process `pid` that started them."""
    used: dict[str, float] = defaultdict(float)
    for process in psutil.Process(pid).children(recursive=True):
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:  # it has ended
            continue
        role = next((name for start, name in roles.items() if title.startswith(start)), "Ray")
        used[role] += times.user + times.system
    return used
