"""The limits of the device that a roofline shows: how fast it reads memory, and how fast it multiplies matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from workers.model.loading import DTYPES

MIB = 2**20
_CACHES = Path("/sys/devices/system/cpu")
_PASSES = 5
_WIDTH, _GPU_WIDTH = 1024, 8192
"""Rows and columns of the matrices whose product is timed, on CPU and on a GPU."""


@dataclass(frozen=True, slots=True)
class Roofs:
    """What the device reaches with PyTorch's own operations."""

    bytes_per_second: float
    """Reading more memory than any cache holds."""
    flops_per_second: float
    """Multiplying square matrices."""


def measure_roofs(dtype: str, device: str) -> Roofs:
    """Measure both limits, in about a second. The fastest of a few passes counts: other load only slows passes down."""
    place = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    width = _GPU_WIDTH if place.type == "cuda" else _WIDTH
    one = torch.ones(width, width, dtype=DTYPES[dtype], device=place)
    multiplying = _fastest(lambda: one @ one, place)
    return Roofs(ReadBandwidth(place.type).measure(), 2.0 * width**3 / multiplying)


class ReadBandwidth:
    """Measures how many bytes per second a device reads, by summing more data than any cache holds."""

    def __init__(self, device: str = "cpu") -> None:
        """On `cpu`, all threads of this process read."""
        self._buffer = torch.ones(_buffer_bytes(device) // 4, device=device)

    def measure(self, passes: int = _PASSES) -> float:
        """Bytes per second of the fastest of a few passes, because other load only slows passes down."""
        return self._buffer.nbytes / _fastest(self._buffer.sum, self._buffer.device, passes)


def last_level_cache_bytes() -> int:
    """Bytes of the largest cache of any core; 32 MiB if the system does not report it."""
    sizes = [
        int(text[:-1]) * {"K": 1024, "M": MIB}.get(text[-1], 1)
        for file in _CACHES.glob("cpu*/cache/index*/size")
        if (text := _read(file)) and text[:-1].isdigit()
    ]
    return max(sizes, default=32 * MIB)


def _buffer_bytes(device: str) -> int:
    """More than any cache holds, and at most a quarter of the free memory."""
    if device == "cuda":
        return min(4096 * MIB, int(torch.cuda.mem_get_info()[0]) // 4)
    return min(max(256 * MIB, 8 * last_level_cache_bytes()), int(psutil.virtual_memory().available) // 4)


def _fastest(compute: Callable[[], torch.Tensor], place: torch.device, passes: int = _PASSES) -> float:
    seconds: list[float] = []
    for _ in range(passes):
        begun = time.perf_counter()
        compute()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
