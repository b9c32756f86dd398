"""Limits of the machine: how fast it reads memory, and how many bytes a step must read."""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path

import psutil
import torch
from torch import nn

from cluster.core.config.target_section import TargetSection
from workers.model.stored.quantized_checkpoint import stored_bytes

MIB = 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def describe() -> str:
    """One line for the report: processor, cores, instruction set, memory and torch."""
    name = platform.processor() or platform.machine()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    memory = psutil.virtual_memory().total / 2**30
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {os.cpu_count()} cores, {vectors}, {memory:.0f} GiB; torch {torch.__version__}"


def weight_bytes(section: TargetSection, *, read_by_a_step: bool = False) -> int:
    """Bytes of the weights in the section's type. A tied tensor counts once.

    With `read_by_a_step`, input embeddings that are not tied to the head are left out, because a step reads a few of
    their rows only. In `int8`, the weights of linear layers take one byte each.
    """
    if section.quantization == "stored":
        stored = stored_bytes(Path(section.path), section.dtype, read_by_a_step=read_by_a_step)
        if stored is not None:
            return stored
    from transformers import AutoConfig, AutoModelForCausalLM  # it takes 150 MB, and `memory` measures processes

    config = AutoConfig.from_pretrained(section.path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=_DTYPES[section.dtype])
    model.tie_weights()
    left_out = set()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if read_by_a_step and head is not None and head.weight is not embeddings.weight:
        left_out.add(id(embeddings.weight))
    in_a_byte = set()
    if section.quantization == "int8":
        in_a_byte = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    sizes = Counter(
        {
            id(tensor): tensor.numel() * (1 if id(tensor) in in_a_byte else tensor.element_size())
            for tensor in model.parameters()
            if id(tensor) not in left_out
        }
    )
    return sizes.total()


def peak_resident_bytes() -> int:
    """Peak resident memory of this process (`VmHWM`), in bytes."""
    return _status("VmHWM")


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def _status(key: str) -> int:
    for line in _lines(Path("/proc/self/status")):
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return resident_bytes()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
