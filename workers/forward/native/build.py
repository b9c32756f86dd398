"""Builds the CPU kernels with this machine's C compiler on first use, and keeps the library for the next start.

A library is loaded only from a folder that this user owns and nobody else may write. An image without a compiler has
libraries built before, for common instruction sets, beside the code: see `workers.forward.native.prebuild`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import torch

from workers.forward.code_folder import UnsafeFolder, is_private_file, make_private_folder
from workers.ranks import found_by_all, is_equal_on_all

logger = logging.getLogger(__name__)

# No flag may let the compiler reorder sums: results must not depend on the number of rows in a step.
_FLAGS = [
    *("-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
]
_HEADERS = (
    "numbers.h",
    "attention.h",
    "positions.h",
    "products.h",
    "finish.h",
    "tiles.h",
    "registers.h",
    "leading.h",
    "packed_groups.h",
    "groups.h",
    "split_groups.h",
    "windows.h",
    "largest.h",
)
_SOURCES = (
    "attention.c",
    "attention_tiles.c",
    "finish.c",
    "products.c",
    "packed_groups.c",
    "groups.c",
    "split_groups.c",
    "group_tiles.c",
    "small_group_tiles.c",
    "split.c",
    "tiles.c",
    "experts.c",
    "windows.c",
    "decoder.c",
    "leading.c",
    "largest.c",
    "markov.c",
    "recurrence.c",
    "sourced_decoder.c",
)
_BUILD_SECONDS = 600.0
_MOST_COMPILERS = 8
"""Most compilers that run at once. Each takes some hundred MB."""
PREBUILT = Path(__file__).parent / "prebuilt"
"""Folder of libraries that were built before, beside the code."""


class _Group:
    """What the ranks of this process's group have agreed on."""

    has_library = True


def load_library(directory: str | None) -> ctypes.CDLL | None:
    """Load the library, building it if `directory` does not have it. Returns `None` if it cannot be built.

    A library in `PREBUILT` that this processor can run is taken first. If others may write to `directory`, nothing in
    it is loaded: the library is built for this process alone. Where ranks have found that one of them has no library,
    there is none: see `agree_on_library`.
    """
    return own_library(directory) if _Group.has_library else None


def agree_on_library(directory: str | None, ranks: int) -> None:
    """From now on, let a rank load the library only if every rank has it. With several `ranks`, all call this together.

    Ranks compute some numbers each by itself, as the choice of experts and recurrent states: their bits must be equal,
    so all of them use the kernels, or none does. The processors are not ours to choose: a difference is logged.
    """
    _Group.has_library = True
    if ranks == 1:
        return
    own = own_library(directory)
    _Group.has_library = found_by_all(own, ranks) is not None
    if own is not None and not _Group.has_library:
        logger.warning("the CPU kernels are not used, because another rank has none: models use a slower path")
    if not is_equal_on_all(f"{products(directory)}, {torch.backends.cpu.get_cpu_capability()}", ranks):
        logger.warning("the ranks' processors differ: what each rank computes by itself may differ in the last bits")


@cache
def own_library(directory: str | None) -> ctypes.CDLL | None:
    """The library of this process, whatever other ranks have; see `load_library`."""
    prebuilt = _find_prebuilt()
    compiler = _find_compiler()
    try:
        if prebuilt is not None:
            return _load(prebuilt)
        if compiler is None:
            logger.warning("no C compiler found: models on this CPU use a slower path")
            return None
        if directory is not None and _is_private(Path(directory)):
            return _load(_build(compiler, Path(directory)))
        with tempfile.TemporaryDirectory(prefix="pilotfish-") as temporary:
            return _load(_build(compiler, Path(temporary)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the CPU kernels cannot be built; models use a slower path: %s", error)
        return None


def _is_private(directory: Path) -> bool:
    """Make `directory` unless it exists. Logs why nothing is loaded from it if others may write to it."""
    try:
        make_private_folder(directory)
    except UnsafeFolder as error:
        logger.warning("the CPU kernels are built again for this process: %s", error)
        return False
    return True


@cache
def kernel_identity(directory: str | None) -> str | None:
    """A hash of all that the kernels' results depend on: the library's bytes, its tile registers, and the processor.

    Returns `None` without a library, or if its file is gone.
    """
    library = own_library(directory)
    if library is None:
        return None
    try:
        code = Path(library._name).read_bytes()  # another compiler builds other code of the same name
    except OSError:
        return None
    parts = (code, str(library.pilotfish_use_tiles()).encode(), _processor())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def products(directory: str | None) -> str:
    """Name the products of the CPU kernels: on tile registers or not, int8 weights as integers (AMX, VNNI) or not, and
    numbers in bfloat16 as such or widened.

    Results differ between them in the last bits. Empty without a library.
    """
    library = load_library(directory)
    if library is None:
        return ""
    tiles, integers = library.pilotfish_use_tiles(), library.pilotfish_splits_rows(ctypes.c_int64(64))
    return f"tiles {tiles}, integers {integers}, bfloat16 {library.pilotfish_has_bfloat16_products()}"


def _load(file: Path) -> ctypes.CDLL:
    """Load a library, and let it use the processor's tile registers (AMX) if a trial there succeeds."""
    library = ctypes.CDLL(str(file))
    if library.pilotfish_use_tiles():
        logger.info("the CPU kernels multiply bfloat16 on tile registers (AMX)")
    return library


def build_for(instruction_set: InstructionSet, directory: Path) -> Path:
    """Build the library for an instruction set into `directory`. Raises `OSError`, `subprocess.SubprocessError`."""
    compiler = _find_compiler()
    if compiler is None:
        raise FileNotFoundError("building the CPU kernels needs a C compiler: found neither cc nor gcc")
    return _compile(compiler, _flags(instruction_set), _prebuilt_name(instruction_set), directory)


def _find_compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def _find_prebuilt() -> Path | None:
    """The library in `PREBUILT` for the largest instruction set that this processor has."""
    if not PREBUILT.is_dir():
        return None
    flags = processor_flags()
    files = (PREBUILT / _prebuilt_name(one) for one in INSTRUCTION_SETS if one.needed <= flags)
    return next((file for file in files if file.exists()), None)


def _prebuilt_name(instruction_set: InstructionSet) -> str:
    return f"kernels-{instruction_set.name}-{_identity(_flags(instruction_set))}.so"


def _flags(instruction_set: InstructionSet) -> list[str]:
    return [*(flag for flag in _FLAGS if flag != "-march=native"), *instruction_set.compiler_flags]


def _build(compiler: str, directory: Path) -> Path:
    """The shared library for these sources, flags and processor. It uses the OpenMP runtime that torch has loaded."""
    return _compile(compiler, _FLAGS, f"kernels-{_identity(_FLAGS, _processor())}.so", directory)


def _identity(flags: Sequence[str], processor: bytes = b"") -> str:
    """A hash of the sources, the compiler's flags and the processor."""
    parts = (*_code().values(), " ".join(flags).encode(), processor)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _code() -> dict[str, bytes]:
    return {name: resources.files(__package__).joinpath(name).read_bytes() for name in (*_HEADERS, *_SOURCES)}


def _compile(compiler: str, flags: Sequence[str], name: str, directory: Path) -> Path:
    """The library `name` in `directory`, compiled unless it exists as a file that nobody else may write."""
    library = directory / name
    if is_private_file(library):
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as build_directory:
        for file, content in _code().items():
            Path(build_directory, file).write_bytes(content)
        objects = [f"{file}.o" for file in _SOURCES]
        commands = [[*flags, "-c", file, "-o", output] for file, output in zip(_SOURCES, objects, strict=True)]

        def run(command: Sequence[str]) -> None:
            subprocess.run(  # noqa: S603 - our own source, with the compiler of this machine
                [compiler, *command], cwd=build_directory, check=True, capture_output=True, timeout=_BUILD_SECONDS
            )

        with ThreadPoolExecutor(min(_MOST_COMPILERS, os.cpu_count() or 1)) as threads:
            list(threads.map(run, commands))  # raises what the first of them raised
        run(["-shared", *objects, "-o", library.name])
        Path(build_directory, library.name).chmod(0o755)
        os.replace(
            Path(build_directory, library.name), library
        )  # processes may build at the same time; all build the same library
    return library


def _processor() -> bytes:
    """A description of the processor: the effect of `-march=native` depends on it."""
    lines = _processor_lines()
    return "".join(lines if lines is not None else [platform.processor()])[:8192].encode()


def _processor_lines() -> list[str] | None:
    """Lines of /proc/cpuinfo with the names and the flags of the cores; `None` on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    return [line for line in lines if line.startswith(("model name", "flags"))]


# The instruction sets that images carry kernels for.
_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A set of instructions, by the names of Linux and of the compiler."""

    name: str
    needed: frozenset[str]
    """Flags in /proc/cpuinfo of a processor that has these instructions."""
    compiler_flags: tuple[str, ...]


INSTRUCTION_SETS = (
    InstructionSet(
        "x86-64-v4-bf16",
        _AVX512 | {"avx512_bf16", "avx512_vnni"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    ),
    InstructionSet("x86-64-v4", _AVX512, ("-march=x86-64-v4",)),
    InstructionSet("x86-64-v3", _AVX2, ("-march=x86-64-v3",)),
)
"""The largest first."""


def processor_flags() -> frozenset[str]:
    """The flags of this machine's processor in /proc/cpuinfo; empty on other processors and systems."""
    if platform.machine() != "x86_64":
        return frozenset()
    lines = _processor_lines() or []
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))
