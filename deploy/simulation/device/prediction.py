"""From what a step does to how long it takes on an H100: a prediction, since nobody has measured it.

Every constant is named with its source. What has no published source is an assumption, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.simulation.device.step import StepCount


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


H100 = Device(
    bytes_per_second=3.35e12,  # NVIDIA's data sheet, H100 SXM
    flops_per_second=989e12,  # NVIDIA's data sheet, H100 SXM, bfloat16 without sparsity
    graph_launch_seconds=0.5e-6,  # NVIDIA's blog "Getting Started with CUDA Graphs", 2019: 3.4 - 2.9 µs, on a V100
    launch_seconds=3.8e-6,  # the same, launches without a graph
    link_bytes_per_second=450e9,  # NVIDIA's data sheet: 900 GB/s NVLink in both directions together
    all_reduce_seconds=8e-6,  # an assumption: one-shot over NVLink between 8 GPUs
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Times of a step, in seconds."""

    seconds: float
    """Predicted time of the step with the model's pass in a CUDA graph."""
    eager_seconds: float
    """Predicted time of the step with each kernel launched by the host."""
    floor_seconds: float
    """The weights and the keys and values once, or the operations at the peak, whichever takes longer."""
    all_reduce_seconds: float
    sampling_seconds: float


_SAMPLING = {"largest_logits", "sum_digits", "choose_digits", "best_of_tiles", "join_tiles"}


def predict(step: StepCount, device: Device = H100) -> Prediction:
    """Predict the times of a step: each kernel takes what its bytes or its operations take, and its launch."""
    works = [
        (kernel.name, max(kernel.bytes / device.bytes_per_second, kernel.flops / device.flops_per_second))
        for kernel in step.kernels
    ]
    reduced = sum(device.all_reduce_seconds + 2 * count / device.link_bytes_per_second for count in step.all_reduces)
    sampling = sum(work + device.launch_seconds for name, work in works if name in _SAMPLING)
    graph = sum(work + device.graph_launch_seconds for name, work in works if name not in _SAMPLING)
    eager = sum(max(work, device.launch_seconds) for name, work in works if name not in _SAMPLING)
    floor = max((step.weight_bytes + step.kv_bytes) / device.bytes_per_second, step.flops / device.flops_per_second)
    return Prediction(graph + sampling + reduced, eager + sampling + reduced, floor, reduced, sampling)
