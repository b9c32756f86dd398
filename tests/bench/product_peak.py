"""Measures how many multiplications and additions all threads together compute with operands in registers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from tests.bench.report import Stopwatch
from workers.forward.native import build
from workers.forward.native.attention import KINDS

_SOURCE = Path(__file__).with_name("peak.c")
_HEADERS = Path(build.__file__).parent
_COUNT, _PASSES = 20_000_000, 3


def product_peak(dtype: torch.dtype) -> float | None:
    """Operations per second with vectors of this dtype; `None` without a C compiler.

    The fastest of a few passes counts, because other load only slows passes down. Tile registers (AMX) are not used.
    """
    library = _library()
    if library is None:
        return None
    seconds: list[float] = []
    for _ in range(_PASSES):
        with Stopwatch() as watch:
            operations = library.pilotfish_peak(KINDS[dtype], _COUNT)
        seconds.append(watch.seconds)
    return float(operations) * torch.get_num_threads() / min(seconds)


@cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    flags = ["-O3", "-march=native", "-fPIC", "-fopenmp", "-shared", f"-I{_HEADERS}"]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "peak.so")
        subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(file)], check=True, capture_output=True)
        library = ctypes.CDLL(str(file))
    library.pilotfish_peak.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.pilotfish_peak.restype = ctypes.c_double
    return library
