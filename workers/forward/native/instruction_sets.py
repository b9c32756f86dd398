"""The instruction sets that images carry CPU kernels for."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

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
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))
