"""How fast a GPU is: the peaks of its data sheet, and what kernels achieve of them.

The shares were measured on an H200 (`tests/bench/results/device-h200.json`, 2026-11-26), which has the multiprocessors
of an H100 and faster memory: 4,800 GB/s by NVIDIA's data sheet. Every constant is named with its source. What has no
published or measured source is an assumption, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from deploy import roofline


class Ring(NamedTuple):
    """A protocol with which NCCL sums around a ring of ranks."""

    seconds: float
    """Time of a sum of few bytes without its hops."""
    hop_seconds: float
    """Time of each of the 2 (ranks - 1) hops."""
    bytes_per_second: float
    """What a GPU sends to the next one."""


@dataclass(frozen=True, slots=True)
class Device:
    """The speeds of a GPU."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    graph_launch_seconds: float
    """Time between two kernels, in a CUDA graph or outside."""
    launch_seconds: float
    """Least time from the launch of a kernel by the host to the next one."""
    link_bytes_per_second: float
    """What a GPU sends to the others."""
    all_reduce_seconds: float
    """Time of an all-reduce of few bytes through symmetric memory."""
    host_bytes_per_second: float
    """What a GPU and its host send each other, in each direction."""
    rings: tuple[Ring, ...]
    """NCCL's protocols, of which each sum takes the quickest; the last one also sends from rank to rank."""


H100 = Device(
    name=roofline.H100.name,
    bytes_per_second=roofline.H100.bytes_per_second,
    flops_per_second=roofline.H100.flops_per_second["bfloat16"],
    graph_launch_seconds=0.5e-6,  # NVIDIA's blog "Getting Started with CUDA Graphs", 2019: 3.4 - 2.9 µs, on a V100
    launch_seconds=3.8e-6,  # the same, launches without a graph
    link_bytes_per_second=450e9,  # NVIDIA's data sheet: 900 GB/s NVLink in both directions together
    host_bytes_per_second=64e9,  # NVIDIA's data sheet: 128 GB/s of PCIe in both directions together
    all_reduce_seconds=8e-6,  # an assumption: one-shot over NVLink between 8 GPUs
    # By the model with which NCCL chooses (`baseLat`, `hwLat` and `llMaxBws` in its `src/graph/tuning.cc`): LL, LL128
    # and Simple. Sums in the NVLink switch, which it may take for large ones, are left out.
    rings=(Ring(6.6e-6, 0.6e-6, 141e9), Ring(14e-6, 1.9e-6, 0.92 * 450e9), Ring(8.4e-6, 3.4e-6, 450e9)),
)


H200 = replace(H100, name="H200", bytes_per_second=4.8e12)  # NVIDIA's data sheet, H200 SXM; all else is as the H100's
DEVICES = {"H100": H100, "H200": H200}
"""The GPUs on which times are predicted, by name."""


class Achieved(NamedTuple):
    """What kernels of one kind achieve."""

    bytes: float
    """Share of the memory's bandwidth, as a factor."""
    flops: float
    """Share of the peak of the tensor cores, as a factor."""
    seconds: float
    """Time beside that of its bytes or operations: its first loads wait for memory, and its last programs run alone."""
    step_seconds: float = 0.0
    """Time of one of the steps that a program takes one after another (`Kernel.steps`)."""


READING = 4307e9 / H200.bytes_per_second
"""Steps, ÷ reading the weights: the read bandwidth, in GB/s."""
PRODUCTS = Achieved(READING, 0.79, 3.9e-6)
"""Products with plain weights, and those of experts. 0.79: a product of 2,048 rows with gate_up takes 615 µs,
782 TFLOP/s. 3.9 µs: the 128 products of a step of one row take 3.74 ms, of which reading their weights is 3.24."""
PACKED = Achieved(READING * 0.35, 0.13, 3.9e-6)
"""Products with weights of 4 bits in groups: those of a layer with one row take 92.6 µs, and reading 27.0. With 2,048
rows that of gate_up takes 3,735 µs, 129 TFLOP/s."""
ATTENTION = Achieved(READING, 0.2, 4.9e-6, step_seconds=0.0228e-6)
"""Attention of rows of up to 64 tokens; a step is a key of the longest split. One row takes 7.9 µs over 128 keys and
18.5 µs over 2,048, in splits of 512. Operations are as those of prompts."""
PROMPTS = Achieved(READING, 0.2, 55e-6)
"""Attention of wider rows: 2,048 tokens take 231 µs by themselves and 2,981 µs after 16,384 others. The difference is
computed at 200 TFLOP/s. It leaves 59 µs of the first, and 51 µs of the 137 µs of eight rows of 512."""
OTHERS = Achieved(READING, 1.0, 2.0e-6, step_seconds=0.35e-6)
"""Norms, gates, rotations, routes, samples, and what PyTorch launches for one operation. 65 norms of a step of one row
take 0.14 ms, 32 gates 0.05 ms. Its steps, the tokens of a recurrence, are an assumption: 600 cycles at 1.755 GHz. The
assembler makes 350 instructions of a token."""
