"""Builds the CPU kernels with this machine's C compiler on first use, and keeps the library for the next start."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

logger = logging.getLogger(__name__)

# No flag may let the compiler reorder sums: results must not depend on the number of rows in a step.
_FLAGS = [
    *("-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
]
_HEADERS, _SOURCES = ("attention.h",), ("attention.c", "decoder.c")
_BUILD_SECONDS = 120.0


@cache
def load_library(directory: str | None) -> ctypes.CDLL | None:
    """Load the library, building it if `directory` does not have it. Returns `None` if it cannot be built."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        logger.warning("no C compiler found: models on this CPU use a slower path")
        return None
    try:
        if directory is not None:
            return ctypes.CDLL(str(_build(compiler, Path(directory))))
        with tempfile.TemporaryDirectory(prefix="pilotfish-") as temporary:
            return ctypes.CDLL(str(_build(compiler, Path(temporary))))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the CPU kernels cannot be built; models use a slower path: %s", error)
        return None


def _build(compiler: str, directory: Path) -> Path:
    """The shared library for these sources, flags and processor. It uses the OpenMP runtime that torch has loaded."""
    code = {name: resources.files(__package__).joinpath(name).read_bytes() for name in (*_HEADERS, *_SOURCES)}
    identity = hashlib.sha256(b"\0".join((*code.values(), " ".join(_FLAGS).encode(), _processor()))).hexdigest()[:24]
    library = directory / f"kernels-{identity}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as build_directory:
        for name, content in code.items():
            Path(build_directory, name).write_bytes(content)
        objects = [f"{name}.o" for name in _SOURCES]
        commands = [[*_FLAGS, "-c", name, "-o", output] for name, output in zip(_SOURCES, objects, strict=True)]
        for command in (*commands, ["-shared", *objects, "-o", library.name]):
            subprocess.run(  # noqa: S603 - our own source, with the compiler of this machine
                [compiler, *command], cwd=build_directory, check=True, capture_output=True, timeout=_BUILD_SECONDS
            )
        os.replace(
            Path(build_directory, library.name), library
        )  # processes may build at the same time; all build the same library
    return library


def _processor() -> bytes:
    """A description of the processor: the effect of `-march=native` depends on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor().encode()
    return "".join(line for line in lines if line.startswith(("model name", "flags")))[:8192].encode()
