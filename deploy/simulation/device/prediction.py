"""From what a step does to how long it takes on an H100: a prediction, since nobody has measured it.

Every constant is named with its source. What has no published source is an assumption, and says so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from deploy.simulation.device.fake_device import Kernel
from deploy.simulation.device.models import RankModel
from deploy.simulation.device.step import ALL_REDUCE, WAIT, Rows, StepCount, count_step
from workers.forward.symmetric_all_reduce import AllReduce, kind_of


@dataclass(frozen=True, slots=True)
class Device:
    """The speeds of a GPU."""

    bytes_per_second: float
    flops_per_second: float
    graph_launch_seconds: float
    """Time between two kernels of a CUDA graph."""
    launch_seconds: float
    """Least time of a kernel that the host launches by itself."""
    link_bytes_per_second: float
    """What a GPU sends to the others."""
    all_reduce_seconds: float
    """Time of an all-reduce of few bytes."""
    scan_seconds: float
    """Time of one token of a recurrence after the one before."""


H100 = Device(
    bytes_per_second=3.35e12,  # NVIDIA's data sheet, H100 SXM
    flops_per_second=989e12,  # NVIDIA's data sheet, H100 SXM, bfloat16 without sparsity
    graph_launch_seconds=0.5e-6,  # NVIDIA's blog "Getting Started with CUDA Graphs", 2019: 3.4 - 2.9 µs, on a V100
    launch_seconds=3.8e-6,  # the same, launches without a graph
    link_bytes_per_second=450e9,  # NVIDIA's data sheet: 900 GB/s NVLink in both directions together
    all_reduce_seconds=8e-6,  # an assumption: one-shot over NVLink between 8 GPUs
    scan_seconds=0.35e-6,  # an assumption: 600 cycles at 1.755 GHz. The assembler makes 350 instructions of a token
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Times of a step, in seconds."""

    seconds: float
    """Predicted time of the step: with the model's pass in a CUDA graph, if it can be one."""
    eager_seconds: float
    """Predicted time of the step with each kernel launched by the host."""
    floor_seconds: float
    """The weights, keys, values and recurrent states once, or the operations at the peak, whichever takes longer."""
    all_reduce_seconds: float
    """Time of all all-reduces, also of those that run beside other work, in seconds."""
    sampling_seconds: float


_SAMPLING = {"largest_logits", "sum_digits", "choose_digits", "best_of_tiles", "join_tiles"}


def predict(step: StepCount, device: Device = H100) -> Prediction:
    """Predict the times of a step: each kernel takes what its bytes, its operations or its
    tokens in a row take, and its launch.

    All-reduces run one after another, beside the kernels between their beginning and their end. That both then share
    the device's memory and multiprocessors is left out.
    """
    reduced = sum(_reduce_seconds(count, step.ranks, device) for count in step.all_reduces)
    sampling = sum(_work(one, device) + device.launch_seconds for one in step.kernels if one.name in _SAMPLING)
    moved = step.weight_bytes + step.kv_bytes + step.state_bytes
    floor = max(moved / device.bytes_per_second, step.flops * step.share / device.flops_per_second)
    eager = _seconds(step, device, in_graph=False)
    seconds = _seconds(step, device, in_graph=True) if step.is_captured else eager
    return Prediction(seconds, eager, floor, reduced, sampling)


def _work(kernel: Kernel, device: Device) -> float:
    """The time of a kernel without its launch: of its bytes, its operations, or its tokens one after another."""
    moved, computed = kernel.bytes / device.bytes_per_second, kernel.flops / device.flops_per_second
    return max(moved, computed, kernel.steps * device.scan_seconds)


def _reduce_seconds(count: int, ranks: int, device: Device) -> float:
    """The time of an all-reduce of so many bytes.

    In one shot, each rank reads those of all others. Otherwise it sends 2 (ranks - 1) / ranks of them (Patarasuk and
    Yuan, 2009), first what others add and then what it has added.
    """
    each = ranks - 1 if kind_of(count, ranks) is AllReduce.ONE_SHOT else 2 * (ranks - 1) / ranks
    return device.all_reduce_seconds + each * count / device.link_bytes_per_second


def _seconds(step: StepCount, device: Device, *, in_graph: bool) -> float:
    """The time until the last kernel of a step has ended. Those that sample are outside of the graph."""
    now = linked = 0.0
    ends: deque[float] = deque()
    for kernel in step.sequence:
        if kernel.name == ALL_REDUCE:
            linked = max(now, linked) + _reduce_seconds(kernel.bytes, step.ranks, device)
            ends.append(linked)
        elif kernel.name == WAIT:
            now = max(now, ends.popleft())
        else:
            work = _work(kernel, device)
            if kernel.name in _SAMPLING:
                seconds = work + device.launch_seconds
            else:
                seconds = work + device.graph_launch_seconds if in_graph else max(work, device.launch_seconds)
            now += seconds
    return now


STEPS: dict[str, tuple[Rows, ...]] = {
    "decode 1 × 2k": (Rows(1, 2048),),
    "decode 8 × 2k": (Rows(8, 2048),),
    "decode 64 × 2k, top-p": (Rows(64, 2048, top_p=True),),
    "verify 64 × 8 at 2k": (Rows(64, 2048, nodes=7),),
    "prompt of 2k": (Rows(1, 0, fresh=2048),),
    "prompt of 16k": (Rows(1, 0, fresh=16384),),
    "decode 32 × 2k and a prompt chunk of 1k": (Rows(32, 2048), Rows(1, 1024, fresh=1024)),
}
"""The steps that are predicted, by name."""


def prediction_table(model: RankModel) -> Table:
    """One row per step of one rank of the model."""
    part = f", one rank of {model.ranks}" if model.ranks > 1 else ""
    table = Table(title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("step")
    for heading in ("kernels", "per\nlayer", "GB", "TFLOP", "predicted\nms", "floor\nms", "ratio", "sampling\nms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, rows in STEPS.items():
        step = count_step(model, rows)
        found = predict(step)
        kind = "bfloat16, experts in MXFP4" if model.has_mxfp4 else "bfloat16"
        kind += "" if model.kv_dtype == "auto" else f", keys and values in {model.kv_dtype}"
        compiled = "" if step.is_fused else ", layers not compiled" if step.state_bytes else ", layers compiled"
        table.title = f"{model.name}{part} in {kind} on H100{compiled}: predicted"
        table.add_row(
            name,
            str(step.launches),
            str(step.layer_kernels),
            f"{step.bytes / 1e9:.1f}",
            f"{step.flops / 1e12:.2f}",
            f"{1e3 * found.seconds:.2f}",
            f"{1e3 * found.floor_seconds:.2f}",
            f"{found.seconds / found.floor_seconds:.2f}",
            f"{1e3 * found.sampling_seconds:.2f}",
        )
    return table
