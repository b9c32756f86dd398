"""CPU kernels that are compiled once for all processes of a test run, and kept for later runs in any checkout."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.settings import cache_directory, code_directory
from workers.forward.native import build

COMPILED = code_directory(cache_directory())
"""The directory where Pilotfish keeps what it has compiled on this machine."""
KEPT = COMPILED / "tests"
"""A directory of compiled code, for processes that a test starts."""
NARROW = ("-DLANES=8", "-DREGISTERS=16")
WIDE = ("-DLANES=16", "-DREGISTERS=32")
EMULATED_TILES = (*WIDE, "-DEMULATE_TILES")


def portable(*width: str) -> list[str]:
    """The compiler's flags for portable C of a width that this processor may lack.

    Code for 16 lanes takes 39 s to compile with `-O2` on a processor of 8 lanes, and 2 s without optimizations.
    """
    return ["-O0", "-fPIC", "-fopenmp", *width]


@contextmanager
def kept_kernels() -> Iterator[None]:
    """Inside, a directory without kernels receives a copy of the kept ones. They are compiled if there are none.

    Another compiler than this machine's compiles as usual.
    """
    known, compile_library = shutil.which("cc") or shutil.which("gcc"), build._build
    served = COMPILED / f"kernels-{build._identity(build._FLAGS, build._processor())}.so"
    if build.is_private_file(served):
        copy_library(served, KEPT)

    def copied(compiler: str, directory: Path) -> Path:
        if compiler != known:
            return compile_library(compiler, directory)
        return copy_library(compile_library(compiler, KEPT), directory)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "_build", copied)
        yield


def copy_library(library: Path, directory: Path) -> Path:
    """The library's copy in `directory`, made unless it exists. Other processes see a whole file or none."""
    copy = directory / library.name
    if not copy.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as copying:
            os.replace(shutil.copy(library, copying), copy)
    return copy
