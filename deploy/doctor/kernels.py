"""Findings about the compiled CPU kernels."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from deploy.doctor.finding import Finding
from workers.forward.native.build import load_library


def kernel_findings(directory: Path) -> Iterator[Finding]:
    """Whether the kernels can be built and loaded, and whether only this user can write where they are kept.

    Builds them into `directory` if they are not there.
    """
    if load_library(str(directory)) is None:
        yield Finding(
            "CPU kernels", "none: models on CPU use a slower path", "install a C compiler with OpenMP (gcc or clang)"
        )
    else:
        yield Finding("CPU kernels", f"loaded from {directory}")
    if directory.is_dir():
        yield folder_finding(directory)


def folder_finding(directory: Path) -> Finding:
    """Whether nobody else can replace a file of the folder, from which libraries are loaded."""
    status = directory.stat()
    found = f"{directory}, owned by user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
    remedy = None
    if status.st_uid != os.getuid():
        remedy = "set PILOTFISH_CACHE_DIR to a folder of your own"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        remedy = f"run `chmod go-w {directory}`: others may put code there"
    return Finding("folder of compiled code", found, remedy)
