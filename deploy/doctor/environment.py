"""Findings about the machine, the installed software and the compiled CPU kernels. Starts nothing."""

from __future__ import annotations

import platform
import shutil
import stat
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cluster.core.config.draft_section import DraftSection
from deploy.doctor.finding import Finding
from deploy.machine import local_resources
from deploy.preflight import prompt_log_problems
from workers.forward.code_folder import folder_fault
from workers.forward.native.build import load_library

OLDEST_PYTHON = (3, 11)
_PACKAGES = ("torch", "transformers", "ray", "grpcio")
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Ray puts its object store
_LEAST_SHARED_BYTES = 128 * 2**20
_GIB = 2**30


def environment_findings() -> Iterator[Finding]:
    """Python, packages, processor, memory and GPUs."""
    yield python_finding(sys.version_info[:2])
    for package in _PACKAGES:
        yield package_finding(package)
    yield Finding("processor", processor(_read(Path("/proc/cpuinfo"))))
    resources = local_resources()
    yield Finding("cores", f"{resources.cpus:g} usable")
    yield Finding("memory", f"{resources.memory_bytes / _GIB:.1f} GiB free")
    if _SHARED_MEMORY.is_dir():
        yield shared_memory_finding(shutil.disk_usage(_SHARED_MEMORY).free)
    yield gpu_finding(resources.gpus, resources.gpu_memory_bytes, Path("/dev/nvidia0").exists())


def python_finding(found: tuple[int, ...]) -> Finding:
    """Whether this Python can run Pilotfish."""
    remedy = None if found >= OLDEST_PYTHON else f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
    return Finding("Python", platform.python_version(), remedy)


def package_finding(package: str) -> Finding:
    """The installed version of a package."""
    try:
        return Finding(package, version(package))
    except PackageNotFoundError:
        return Finding(package, "not installed", "run `make setup`")


def processor(information: str) -> str:
    """The processor's name and those of its instruction sets that kernels use, from the text of /proc/cpuinfo."""
    entries = dict(line.split(":", 1) for line in reversed(information.splitlines()) if ":" in line)
    names = {key.strip(): value.strip() for key, value in entries.items()}
    flags = names.get("flags", "").split()
    sets = [name for name in _INSTRUCTION_SETS if name in flags]
    return f"{names.get('model name') or platform.machine()} ({', '.join(sets) or 'no vector instructions known'})"


def shared_memory_finding(free: int) -> Finding:
    """Whether Ray's object store fits into the shared memory."""
    remedy = None
    if free < _LEAST_SHARED_BYTES:
        remedy = f"give the container at least {_LEAST_SHARED_BYTES // 2**20} MiB (docker run --shm-size)"
    return Finding("shared memory", f"{free / 2**20:.0f} MiB free", remedy)


def gpu_finding(count: int, free: int, has_device: bool) -> Finding:
    """The visible GPUs. `free` is the free memory of the fullest one, in bytes."""
    if count:
        return Finding("GPUs", f"{count}, at least {free / _GIB:.1f} GiB free on each")
    if has_device:
        return Finding("GPUs", "a device that torch cannot use", "install a build of torch for CUDA, and its driver")
    return Finding("GPUs", "none")


def prompt_log_findings(draft: DraftSection) -> Iterator[Finding]:
    """Whether chats can be stored in `draft.prompt_log_directory`, where it is set."""
    if draft.prompt_log_directory is not None:
        problem = next(prompt_log_problems(draft), None)
        found, remedy = (draft.prompt_log_directory, None) if problem is None else (problem.found, problem.remedy)
        yield Finding("draft.prompt_log_directory", found, remedy)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError:
        return ""


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
