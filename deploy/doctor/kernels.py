"""Findings about the compiled CPU kernels."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from deploy.doctor.finding import Finding
from workers.forward.code_folder import folder_fault
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
        yield Finding("CPU kernels", "loaded")
    if directory.is_dir():
        yield folder_finding(directory)


def folder_finding(directory: Path) -> Finding:
    """Whether nobody else can replace a file of the folder, from which libraries are loaded."""
    status, fault = directory.stat(), folder_fault(directory)
    found = f"{directory}, owned by user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
    return Finding("folder of compiled code", found, None if fault is None else f"nothing is loaded from it: {fault}")
