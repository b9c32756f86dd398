"""From what a step does to how long it takes on an H100 or H200: a prediction.

Kernels achieve what they achieve on an H200 (`deploy.simulation.device.speeds`). Those that the device run had none of,
attention over latents and recurrences among them, are taken as others of their kind. What the host does before and
after the kernels of a step is left out, and so are its waits for the GPU, which are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from deploy.roofline import DECODING
from deploy.simulation.device.attention import NARROW, WIDE
from deploy.simulation.device.decisions import ALL_GATHER, GATHER
from deploy.simulation.device.fake_device import Kernel
from deploy.simulation.device.kernels import ALL_REDUCE, WAIT
from deploy.simulation.device.models import RankModel
from deploy.simulation.device.speeds import ATTENTION, H100, OTHERS, PACKED, PRODUCTS, PROMPTS, Achieved, Device
from deploy.simulation.device.step import Rows, StepCount, count_step
from workers.forward.symmetric_all_reduce import AllReduce, kind_of


@dataclass(frozen=True, slots=True)
class Prediction:
    """Times of a step, in seconds."""

    seconds: float
    """Predicted time of the step: with the model's pass in a CUDA graph, if it can be one."""
    floor_seconds: float
    """The weights, keys, values and recurrent states once, or the operations, whichever takes longer at the peaks that
    the data sheet names."""
    all_reduce_seconds: float
    """Time of all all-reduces, also of those that run beside other work, in seconds."""
    sampling_seconds: float


_ACHIEVED: dict[str, Achieved] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "multiply_splits", "multiply_tiles"), PRODUCTS),
    "group_product": PACKED,
    NARROW: ATTENTION,
    WIDE: PROMPTS,
}
"""What kernels achieve, by name."""


def predict(step: StepCount, device: Device = H100, *, symmetric_memory: bool = False) -> Prediction:
    """Predict the times of a step: each kernel takes what its bytes, its operations or its
    tokens in a row take, and its launch.

    With `symmetric_memory`, small sums go through it, as with `target.symmetric_memory: on`; NCCL sums the others.
    All-reduces run one after another, beside the kernels between their beginning and their end. That both then share
    the device's memory and multiprocessors is left out.
    """
    times = [
        _reduce_seconds(count, step.ranks, device, symmetric_memory=symmetric_memory) for count in step.all_reduces
    ]
    sampling = sum(launched_seconds(one, step.ranks, device) for one in step.decisions)
    floor = max(step.needed_bytes / device.bytes_per_second, step.flops * step.share / device.flops_per_second)
    moves = sum(launched_seconds(one, step.ranks, device) for one in step.moves)
    seconds = _pass_seconds(step, times, device) + sampling + moves
    return Prediction(seconds, floor, sum(times), sampling)


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """The time of a kernel without its launch: of its bytes or its operations, of its steps, and of waiting."""
    achieved = achieved_of(kernel.name)
    moved = kernel.bytes / (device.bytes_per_second * achieved.bytes)
    computed = kernel.flops / (device.flops_per_second * achieved.flops)
    return max(moved, computed) + kernel.steps * achieved.step_seconds + achieved.seconds


def achieved_of(name: str) -> Achieved:
    """What the kernels of a name achieve."""
    return _ACHIEVED.get(name, OTHERS)


def launched_seconds(kernel: Kernel, ranks: int, device: Device) -> float:
    """The time of a kernel that the host launches by itself, as it launches the next one meanwhile.

    What ranks send each other besides sums goes through NCCL: all of them around a ring, or each to rank 0.
    """
    if kernel.name == GATHER:
        sends = device.rings[-1]
        return sends.seconds + sends.hop_seconds + kernel.bytes / sends.bytes_per_second
    if kernel.name == ALL_GATHER:
        return _ring_seconds(kernel.bytes, ranks - 1, device)
    return max(kernel_seconds(kernel, device) + device.graph_launch_seconds, device.launch_seconds)


def _reduce_seconds(count: int, ranks: int, device: Device, *, symmetric_memory: bool) -> float:
    """The time of an all-reduce of so many bytes.

    In one shot, each rank reads those of all others. Otherwise it sends 2 (ranks - 1) / ranks of them (Patarasuk and
    Yuan, 2009), first what others add and then what it has added.
    """
    kind = kind_of(count, ranks) if symmetric_memory else AllReduce.NCCL
    sent = (ranks - 1 if kind is AllReduce.ONE_SHOT else 2 * (ranks - 1) / ranks) * count
    if kind is not AllReduce.NCCL:
        return device.all_reduce_seconds + sent / device.link_bytes_per_second
    return _ring_seconds(sent, 2 * (ranks - 1), device)


def _ring_seconds(sent: float, hops: int, device: Device) -> float:
    """The time in which each rank sends so many bytes on to the next one, in so many hops."""
    return min(ring.seconds + hops * ring.hop_seconds + sent / ring.bytes_per_second for ring in device.rings)


def _pass_seconds(step: StepCount, all_reduces: Sequence[float], device: Device) -> float:
    """The time until the last kernel of the model's pass has ended. `all_reduces` are the times of the all-reduces."""
    now = linked = 0.0
    reducing = iter(all_reduces)
    ends: deque[float] = deque()
    for kernel in step.sequence:
        if kernel.name == ALL_REDUCE:
            linked = max(now, linked) + next(reducing)
            ends.append(linked)
        elif kernel.name == WAIT:
            now = max(now, ends.popleft())
        elif step.is_captured:
            now += kernel_seconds(kernel, device) + device.graph_launch_seconds
        else:
            now += launched_seconds(kernel, step.ranks, device)
    return now


LEFT_OUT = "Times leave out what the host does before and after these kernels, and its waits for the GPU"
"""What the tables say below their numbers."""


def new_table(title: str | None = None, caption: str | None = f"{LEFT_OUT}.") -> Table:
    """A table of predictions without columns."""
    table = Table(title=title, caption=caption, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    return table


MIXED = (Rows(32, 2048), Rows(1, 1024, fresh=1024))
"""Sequences that decode, and a chunk of a prompt."""
STEPS: dict[str, tuple[Rows, ...]] = {
    "decode 1 × 2k": (Rows(1, 2048),),
    "decode 8 × 2k": (Rows(8, 2048),),
    "decode 64 × 2k, top-p": (Rows(64, 2048, top_p=True),),
    "verify 64 × 8 at 2k": (Rows(64, 2048, nodes=7),),
    "verify 64 × 8 at 2k, top-p": (Rows(64, 2048, nodes=7, top_p=True),),
    "verify 64 × 8 at 2k, trees": (Rows(64, 2048, nodes=7, branches=True),),
    "prompt of 2k": (Rows(1, 0, fresh=2048),),
    "prompt of 16k": (Rows(1, 0, fresh=16384),),
    "decode 32 × 2k and a prompt chunk of 1k": MIXED,
}
"""The steps that are predicted, by name."""


def prediction_table(model: RankModel, device: Device = H100, *, symmetric_memory: bool = False) -> Table:
    """One row per step of one rank of the model; see `predict`."""
    summed = "small sums through symmetric memory" if symmetric_memory else "sums by NCCL"
    part = f", one rank of {model.ranks}, {summed}," if model.ranks > 1 else ""
    table, waits = new_table(), set[int]()
    table.add_column("step")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, rows in STEPS.items():
        step = count_step(model, rows)
        waits.add(step.waits)
        found = predict(step, device, symmetric_memory=symmetric_memory)
        kind = "bfloat16, experts in MXFP4" if model.has_mxfp4 else "bfloat16"
        kind += "" if model.kv_dtype == "auto" else f", keys and values in {model.kv_dtype}"
        compiled = "" if step.is_fused else ", layers not compiled" if step.state_bytes else ", layers compiled"
        table.title = f"{model.name}{part} in {kind} on {device.name}{compiled}: predicted"
        table.add_row(
            name,
            str(step.launches),
            str(step.layer_kernels),
            f"{step.bytes / 1e9:.1f}",
            f"{step.bytes / step.needed_bytes:.2f}",
            f"{step.flops / 1e12:.2f}",
            f"{1e3 * found.seconds:.2f}",
            f"{1e3 * found.floor_seconds:.2f}",
            f"{found.seconds / found.floor_seconds:.2f}",
            f"{100 * found.sampling_seconds / found.seconds:.1f}",
        )
    added = added_chunk(model, device, symmetric_memory=symmetric_memory)
    times = (f"{1e3 * added.seconds:.2f}", f"{1e3 * added.computed_seconds:.2f}")
    ratio = f"{added.seconds / added.computed_seconds:.2f}"
    table.add_row("what that chunk adds; what its operations take", *[""] * 5, *times, ratio, "")
    table.caption = f"{LEFT_OUT}, {' or '.join(map(str, sorted(waits)))} a step."
    return table


_HEADINGS = (
    *("kernels", "per\nlayer", "GB", "÷\nneeded", "TFLOP"),
    *("predicted\nms", "floor\nms", "ratio", "sampling\n%"),
)
"""Columns of the table of steps, after the step's name. Needed are weights, keys, values and recurrent states, once."""


@dataclass(frozen=True, slots=True)
class AddedChunk:
    """What a prompt chunk adds to a step of sequences that decode."""

    seconds: float
    computed_seconds: float
    """What the operations that it adds take, at what products and attention achieve."""


def added_chunk(model: RankModel, device: Device = H100, *, symmetric_memory: bool = False) -> AddedChunk:
    """Predict what the chunk of `MIXED` adds to its other rows."""
    alone, mixed = (count_step(model, rows) for rows in (MIXED[:-1], MIXED))
    attention = sum(kernel.flops for kernel in mixed.kernels if kernel.name == WIDE)
    products = mixed.flops - alone.flops - attention
    before, after = (predict(one, device, symmetric_memory=symmetric_memory).seconds for one in (alone, mixed))
    computed = (attention / PROMPTS.flops + products / PRODUCTS.flops) / device.flops_per_second
    return AddedChunk(after - before, computed)


PROMPT_BOUNDS = (256, 512, 1024, 2048, 4096, 8192)
"""Values of `scheduler.max_prompt_tokens` that are compared."""
_PROMPT_TOKENS = 16384
_DECODING = Rows(DECODING, 2048)


@dataclass(frozen=True, slots=True)
class ChunkedPrompt:
    """The steps of a prompt of which each takes at most so many tokens, beside sequences that decode."""

    bound: int
    first_seconds: float
    mean_seconds: float
    """Mean time of a step: what a token of the sequences that decode waits."""
    last_seconds: float
    prompt_seconds: float
    """Time of all steps."""


def chunked_prompt(
    model: RankModel,
    bound: int,
    prompt: int,
    decoding: Rows,
    device: Device = H100,
    *,
    symmetric_memory: bool = False,
) -> ChunkedPrompt:
    """Predict the steps of a prompt. Those between the first, the middle and the last one are interpolated."""
    begins = range(0, prompt, bound)
    known = sorted({begins[0], begins[len(begins) // 2], begins[-1]})
    seconds = [
        predict(
            count_step(model, (decoding, Rows(1, begin, fresh=min(bound, prompt - begin)))),
            device,
            symmetric_memory=symmetric_memory,
        ).seconds
        for begin in known
    ]
    all_steps = np.interp(begins, known, seconds)
    return ChunkedPrompt(bound, seconds[0], float(all_steps.mean()), seconds[-1], float(all_steps.sum()))


def prompts_table(model: RankModel, device: Device = H100, *, symmetric_memory: bool = False) -> Table:
    """What tokens wait for a prompt beside them, and how long it takes, by the most of its tokens in a step."""
    alone = predict(count_step(model, (_DECODING,)), device, symmetric_memory=symmetric_memory).seconds
    title = f"{model.name}: a prompt of {_PROMPT_TOKENS} tokens beside {_DECODING.count} sequences of "
    title += f"{_DECODING.stored}, whose steps take {1e3 * alone:.1f} ms without it, on {device.name}: predicted"
    table = new_table(title)
    table.add_column("scheduler.max_prompt_tokens", justify="right")
    for heading in ("first step\nms", "mean step\nms", "last step\nms", "prompt\nms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for bound in PROMPT_BOUNDS:
        found = chunked_prompt(model, bound, _PROMPT_TOKENS, _DECODING, device, symmetric_memory=symmetric_memory)
        steps = (found.first_seconds, found.mean_seconds, found.last_seconds)
        table.add_row(str(bound), *(f"{1e3 * one:.1f}" for one in steps), f"{1e3 * found.prompt_seconds:.0f}")
    return table
