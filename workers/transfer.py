"""Copies between the host and a device, waits for a device, and the time that it takes.

A copy to the device does not wait for the work that the device is doing: a copy from pageable memory would, so these
go through pinned memory, which PyTorch reuses only after the copy is done. Copies to the host wait once for several
tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntegerArray = npt.NDArray[np.int64]
HostArray = npt.NDArray[Any]
StepArray = npt.NDArray[np.int64] | npt.NDArray[np.int32]
_ALIGNMENT = 16


def onto(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host, or of `device`, on `device`. One of the CPU is not copied on the way to the CPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")


def to_device(values: Sequence[int] | IntegerArray, device: torch.device) -> Tensor:
    """Integers on `device`, int64. An array is not copied on the way to the CPU."""
    return onto(device, torch.as_tensor(values, dtype=torch.int64))


def launch_on(device: torch.device) -> None:
    """Let this thread launch on a GPU. Triton launches on a thread's current one, whichever GPU its tensors are on.

    A device without an index is the thread's current one.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def tensor_on(device: torch.device, values: Sequence[object], dtype: torch.dtype) -> Tensor:
    """A tensor of `values` on `device`."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def row_indices(rows: Sequence[int], like: Tensor) -> Tensor:
    """Row numbers as an index on the device of `like`: int64 [n]."""
    return tensor_on(like.device, rows, torch.int64)


def rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of a tensor `[n, …]`, in ascending order and each once; the tensor itself if they are all of them."""
    return tensor if len(rows) == len(tensor) else tensor[row_indices(rows, tensor)]


def to_device_together(arrays: Sequence[StepArray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to the device in one piece. Each tensor has the shape and the type of its array."""
    return split_together(joined(arrays, device).to(device, non_blocking=True), arrays)


def joined(arrays: Sequence[StepArray], device: torch.device) -> torch.Tensor:
    """The arrays in one piece, int64 on the host, from where it is copied to `device` without a wait."""
    spans = _spans(arrays)
    words = _words_in(spans)
    if device.type == "cuda":
        whole = torch.empty(words, dtype=torch.int64, pin_memory=True)
        numbers: IntegerArray = whole.numpy()
    else:
        numbers = np.empty(words, dtype=np.int64)
        whole = torch.as_tensor(numbers)
    held = numbers.view(np.uint8)
    for (begin, end), array in zip(spans, arrays, strict=True):
        if end > begin:
            held[begin:end].view(array.dtype)[:] = array.ravel()
    return whole


def on_host(numbers: IntegerArray, device: torch.device) -> torch.Tensor:
    """The numbers on the host, from where they are copied to `device` without a wait."""
    if device.type != "cuda":
        return torch.as_tensor(numbers)
    whole = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
    whole.numpy()[:] = numbers
    return whole


def parts_of(numbers: IntegerArray, arrays: Sequence[StepArray]) -> list[StepArray]:
    """The parts of `joined` arrays, as `split_together` returns them, on the host: each is a view of `numbers`."""
    held = numbers.view(np.uint8)
    return [
        held[begin:end].view(array.dtype).reshape(array.shape)
        for (begin, end), array in zip(_spans(arrays), arrays, strict=True)
    ]


def words_together(arrays: Sequence[StepArray]) -> int:
    """Numbers of 64 bits that the arrays take in one piece."""
    return _words_in(_spans(arrays))


def split_together(whole: torch.Tensor, arrays: Sequence[StepArray]) -> list[torch.Tensor]:
    """The parts of `joined`, on any device: each has the shape and the type of its array."""
    held = whole.view(torch.uint8)
    return [
        held[begin:end].view(torch.int64 if array.itemsize == 8 else torch.int32).view(array.shape)
        for (begin, end), array in zip(_spans(arrays), arrays, strict=True)
    ]


def to_host_together(tensors: Sequence[Tensor]) -> list[HostArray]:
    """Arrays on the host of the tensors of one device, after one wait. Those of the CPU are not copied.

    The arrays of a GPU's tensors are in pinned memory: copy what is kept for long. NumPy has no bfloat16; view such a
    tensor as int16.
    """
    if not any(map(is_on_device, tensors)):
        return [one.detach().numpy() for one in tensors]
    copies = [one.detach().to("cpu", non_blocking=True) for one in tensors]  # PyTorch makes them in pinned memory
    wait_for_device(next(one.device for one in tensors if is_on_device(one)))
    return [one.numpy() for one in copies]


def lists_together(tensors: Sequence[Tensor]) -> list[Any]:
    """Nested lists of the numbers of tensors of one device, after one wait. NumPy's types alone: no bfloat16."""
    if not any(map(is_on_device, tensors)):
        return [one.tolist() for one in tensors]  # arrays of small tensors take as long again
    return [array.tolist() for array in to_host_together(tensors)]


def wait_for_device(device: torch.device) -> None:
    """Wait for what was launched on the current stream of a GPU so far."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).record_event().synchronize()


class DeviceTimer:
    """Times what is launched inside a `with` block, from when the device comes to it. The host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = (_event(), _event()) if device.type == "cuda" else None
        self._begun = self._ended = 0.0

    def __enter__(self) -> Self:
        self._begun = time.perf_counter()
        if self._events is not None:
            self._events[0].record(torch.cuda.current_stream(self._device))
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = time.perf_counter()
        if self._events is not None:
            self._events[1].record(torch.cuda.current_stream(self._device))

    @property
    def seconds(self) -> float | None:
        """The time, once the block has ended; `None` while a GPU has not done all of it.

        On other devices, which compute what they launch at once, it is the time of the block.
        """
        if self._events is None:
            return self._ended - self._begun
        begun, ended = self._events
        return begun.elapsed_time(ended) / 1000 if ended.query() else None  # type: ignore[no-untyped-call]

    @property
    def done_at(self) -> float | None:
        """When the device was done, in seconds on the clock of `time.perf_counter`; `None` while it is not.

        This is so if the device had nothing else to do when the block began; else it was done later.
        """
        seconds = self.seconds
        return None if seconds is None else self._begun + seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor must be copied before the host reads it."""
    return tensor.is_cuda or tensor.device.type != "cpu"


class HostCopies:
    """Tensors of one device that the host reads together: the first that is read waits, once, for all added so far."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, list[HostArray]]] = []

    def add(self, tensor: Tensor) -> Callable[[], HostArray]:
        """Return a function that returns the tensor on the host. Nothing may change the tensor before it is read."""
        found: list[HostArray] = []
        self._waiting.append((tensor, found))

        def read() -> HostArray:
            if not found:
                self._copy()
            return found[0]

        return read

    def _copy(self) -> None:
        waiting, self._waiting = self._waiting, []
        for (_, found), array in zip(waiting, to_host_together([tensor for tensor, _ in waiting]), strict=True):
            found.append(array)


def _spans(arrays: Sequence[StepArray]) -> list[tuple[int, int]]:
    """Where the bytes of each array begin and end. Kernels are compiled for the alignment of what they read."""
    spans, begin = [], 0
    for array in arrays:
        end = begin + array.nbytes
        spans.append((begin, end))
        begin = end + -end % _ALIGNMENT
    return spans


def _words_in(spans: Sequence[tuple[int, int]]) -> int:
    end = spans[-1][1] if spans else 0
    return (end + -end % _ALIGNMENT) // 8
