"""Compiles Triton kernels ahead of time, and reads what the assembler of Triton's wheel says of them."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest


def compiled_ahead() -> list[pytest.MarkDecorator]:
    """The marks of a module whose tests compile kernels. Their bounds hold for the Triton of `make gpu-proof`.

    Another one may be installed: it comes with builds of torch for GPUs.
    """
    pytest.importorskip("triton", reason="triton is not installed: make gpu-proof installs it")
    is_proof = os.environ.get("TRITON_DEFAULT_FP_FUSION") == "1" and os.environ.get("TRITON_INTERPRET") != "1"
    return [pytest.mark.skipif(not is_proof, reason="make gpu-proof compiles the kernels")]


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below a number of at least 1."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Assembled:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_products: int
    """Instructions that multiply on tensor cores."""
    is_asynchronous: bool
    """Whether some of these belong to groups of warps (wgmma, tcgen05)."""
    fused: int
    """Fused multiplications and additions of float32 numbers, apart from those inside of a division."""
    sums: frozenset[str]
    """How the numbers of each sum over float32 lie in the threads, which decides its order."""


class Compiled(NamedTuple):
    """A kernel that was compiled for one generation of GPUs, with some constants."""

    kernel: str
    capability: int
    registers: int
    """Registers of one thread."""
    spilled_bytes: int
    shared_bytes: int
    products: int
    """Instructions of one warp that multiply on tensor cores (`mma`)."""
    group_products: int
    """Instructions of a group of warps that multiply on tensor cores (`wgmma`, `tcgen05.mma`)."""


compiled_kernels: list[Compiled] = []
"""What this process has compiled, in order."""


def table_of(found: Collection[Compiled]) -> Iterator[str]:
    """Lines of a table: for each kernel and generation, the most or the range of each number over its constants."""
    numbers = f"{'compiled':>9}{'registers':>10}{'spilled B':>10}{'shared KiB':>11}{'mma':>8}{'wgmma':>8}"
    yield f"{'kernel':26}{'GPU':>7}{numbers}"
    for (kernel, capability), group in groupby(sorted(found), lambda one: one[:2]):
        of = list(group)
        yield (
            f"{kernel:26}{f'sm_{capability}':>7}{len(of):>9}{_range(one.registers for one in of):>10}"
            f"{max(one.spilled_bytes for one in of):>10}{max(one.shared_bytes for one in of) / 1024:>11.1f}"
            f"{_range(one.products for one in of):>8}{_range(one.group_products for one in of):>8}"
        )


def _range(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]}–{found[-1]}"


def assembled(
    kernel: Any,
    arguments: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    *,
    warps: int = 4,
    stages: int = 3,
    fuses: bool = True,
    most_registers: int | None = None,
    aligned: Sequence[str] = (),
) -> Assembled:
    """Compile a kernel for a GPU and read what the assembler says of it. `fuses` is the launch's `enable_fp_fusion`.

    `aligned` are the pointers and strides that are multiples of 16 when the kernel is launched: loads are wider.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        kernel,
        signature=arguments | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fuses, "maxnreg": most_registers},
    )
    text = compiled.asm["ptx"]
    found = re.search(r"\.target\s+(\w+)", text)
    assert found is not None
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.ptx"
        file.write_text(text, encoding="utf-8")
        command = [ptxas(text), "-v", f"--gpu-name={found[1]}", str(file), "-o", str(file.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill", report)
    assert registers is not None
    products = len(re.findall(r"\bmma\.sync", text))
    group_products = len(re.findall(r"\b(?:wgmma\.mma_async|tcgen05\.mma)", text))
    fused = sum(2 if pair else 1 for pair in re.findall(r"\bfma\.rn(?:\.ftz)?\.f32(x2)?", text))
    numbers = int(registers[1]), sum(map(int, spills)), int(compiled.metadata.shared)
    compiled_kernels.append(Compiled(kernel.fn.__name__, capability, *numbers, products, group_products))
    sums = _sums(compiled.asm["ttgir"])
    return Assembled(*numbers, products + group_products, group_products > 0, fused, sums)


def _sums(text: str) -> frozenset[str]:
    """The layouts of what is summed in a program."""
    layouts = dict(re.findall(r"(#\w+) = (#ttg\.\w+<.*>)", text))
    found = re.findall(r'"tt\.reduce".*?\) : \(tensor<(\w+)xf32, (#\w+)>\)', text, re.DOTALL)
    return frozenset(f"{size}: {layouts[name]}" for size, name in found)


def ptxas(text: str) -> str:
    """The assembler of Triton's wheel that reads this version of PTX; the newer one has a name of its own."""
    import triton

    version = re.search(r"\.version\s+(\d+)", text)
    name = "ptxas-blackwell" if version is not None and int(version[1]) > 8 else "ptxas"
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
