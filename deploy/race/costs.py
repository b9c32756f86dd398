"""Memory and arithmetic of a configuration, and the machine that it runs on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from cluster.core.config.sections import Configuration, ModelSection
from deploy.race.results import Cost
from workers.model.weight_counts import WeightCounts, count_weights

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_VERSIONS = ("pilotfish", "torch", "transformers", "grpcio", "ray")


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def configuration_cost(configuration: Configuration, grown_bytes: int = 0) -> Cost:
    """The cost of a configuration whose paths are local directories. Raises `ModelLoadError`."""
    target = count_weights(Path(configuration.target.path))
    weights = configuration.draft.weights
    modules = [count_weights(Path(section.path)) for section in configuration.draft.modules.values()]
    draft_bytes = sum(_BYTES[configuration.target.dtype] * module.parameters for module in modules)
    draft_flops = sum(2.0 * module.multiply_adds for module in modules)
    if weights is not None:
        draft = count_weights(Path(weights.path))
        draft_bytes += _weight_bytes(weights, draft)
        draft_flops += 2.0 * draft.multiply_adds
    return Cost(
        target_bytes=_weight_bytes(configuration.target, target),
        draft_bytes=draft_bytes,
        resident_bytes=max(0, grown_bytes),
        target_flops=2.0 * target.multiply_adds,
        draft_flops=draft_flops,
    )


def _weight_bytes(section: ModelSection, counts: WeightCounts) -> int:
    return counts.parameters * (1 if section.quantization == "int8" else _BYTES[section.dtype])


def describe_machine() -> dict[str, Any]:
    """Processor, cores, threads, memory, GPUs, versions and the time (UTC)."""
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
