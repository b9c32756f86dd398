"""Passes of fixed sizes, captured as CUDA graphs before the first request, and replayed.

A pass consists of many small kernels, and launching them one by one takes longer than running them. Nothing is captured
while serving. The code does not depend on CUDA: the capture function is a parameter.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from workers.ranks import AnotherRankFailed, least_of_all_ranks, try_together

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
GraphCapture = Callable[[Callable[[], None]], Replay]
"""Runs a function at least once, and returns a function that repeats it on the same tensors."""


class PassSize(Protocol):
    """The size of captured passes: the most of everything that a pass in them may have."""

    def order(self) -> tuple[int, ...]:
        """What it costs: a pass runs in the first size that it fits, in ascending order."""


SizeType = TypeVar("SizeType", bound=PassSize)
PartType = TypeVar("PartType", bound=Hashable)
InputsType = TypeVar("InputsType")


@dataclass(frozen=True, slots=True)
class CapturedPass(Generic[InputsType]):
    """A pass of one size."""

    inputs: InputsType
    """Buffers that are filled before each replay."""
    replay: Replay
    outputs: tuple[Tensor, ...]
    """Written by each replay, and by those of other sizes: they are valid until the next one."""


class _Outcome(IntEnum):
    """What a rank says of a capture. The ranks do what the least of them says."""

    NONE_AT_ALL = 0
    """Nothing can be captured any more."""
    NOT_THIS_SIZE = 1
    CAPTURED = 2


class CapturedPasses(Generic[SizeType, PartType, InputsType]):
    """Captured passes by their size, and by the part of a model that they compute. Not thread-safe."""

    def __init__(
        self,
        make: Callable[[SizeType], InputsType],
        compute: Callable[[InputsType, PartType], Sequence[Tensor]],
        capture: GraphCapture,
        ranks: int = 1,
    ) -> None:
        """`make` makes the inputs of a size, filled with padding; `compute` computes a part from them.

        Several `ranks` agree on each capture.
        """
        self._make: Callable[[SizeType], InputsType] = make
        self._compute: Callable[[InputsType, PartType], Sequence[Tensor]] = compute
        self._capture = capture
        self._ranks = ranks
        self.captured: dict[tuple[SizeType, PartType], CapturedPass[InputsType]] = {}
        self.outputs: tuple[Tensor, ...] = ()
        """The buffers that all captured passes write to; each result is read before the next pass."""
        self._ready: dict[PartType, list[SizeType]] = {}
        self._given_up = False

    def sizes(self, part: PartType) -> Sequence[SizeType]:
        """The captured sizes of a part, in ascending order."""
        return self._ready.get(part, ())

    def capture_all(self, keys: Sequence[tuple[SizeType, PartType]]) -> None:
        """Capture these sizes and parts, the largest first, whose memory the others use. Call this on all ranks."""
        begun = time.perf_counter()
        for size, part in sorted(keys, key=lambda key: key[0].order(), reverse=True):
            if self._given_up:
                break
            self.capture(size, part)
        seconds = time.perf_counter() - begun
        logger.info("captured %d of %d passes as CUDA graphs in %.1f s", len(self.captured), len(keys), seconds)

    @torch.inference_mode()
    def capture(self, size: SizeType, part: PartType) -> bool:
        """Capture a pass over padding only. Returns whether it is captured, the same on all ranks."""
        outputs = self.outputs
        found = self._attempt(size, part)
        own = found if isinstance(found, _Outcome) else _Outcome.CAPTURED
        agreed = _Outcome(least_of_all_ranks(own, self._ranks))
        if agreed is not own:
            logger.warning("passes of %s are not captured as a CUDA graph, because another rank cannot", size)
        if agreed is _Outcome.CAPTURED and isinstance(found, CapturedPass):
            self.captured[size, part] = found
            insort(self._ready.setdefault(part, []), size, key=lambda one: one.order())
            return True
        self.outputs = outputs  # a smaller size needs less
        self._given_up = agreed is _Outcome.NONE_AT_ALL
        return False

    def _attempt(self, size: SizeType, part: PartType) -> CapturedPass[InputsType] | _Outcome:
        """Capture a pass on this rank. Logs why it cannot be captured."""
        refused = "passes of %s cannot be captured and run without a CUDA graph: %r"
        try:
            inputs, outputs = try_together(lambda: self._prepared(size, part), self._ranks)
        except Exception as error:  # the compiler may raise anything
            logger.warning(refused, size, error)
            return _Outcome.NOT_THIS_SIZE

        def write() -> None:
            for buffer, result in zip(outputs, self._compute(inputs, part), strict=True):
                buffer.copy_(result)

        try:
            replay = try_together(lambda: self._capture(write), self._ranks)
        except (torch.OutOfMemoryError, AnotherRankFailed) as error:  # whose rank says whether it can capture others
            logger.warning(refused, size, error)
            return _Outcome.NOT_THIS_SIZE
        except RuntimeError as error:
            logger.warning("no further passes are captured as CUDA graphs: %s", error)
            return _Outcome.NONE_AT_ALL
        return CapturedPass(inputs, replay, outputs)

    def _prepared(self, size: SizeType, part: PartType) -> tuple[InputsType, tuple[Tensor, ...]]:
        """The inputs of a pass of padding only, and the buffers of its outputs, whose shapes a first pass shows."""
        inputs = self._make(size)
        return inputs, self._output_buffers(self._compute(inputs, part))

    def _output_buffers(self, examples: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Buffers of as many rows as the examples have: those of all passes, unless they are too small."""
        held = list(self.outputs)
        for index, example in enumerate(examples):
            if index == len(held):
                held.append(torch.empty_like(example))
            elif len(held[index]) < len(example):
                held[index] = torch.empty_like(example)
        self.outputs = tuple(held)
        return tuple(buffer[: len(example)] for buffer, example in zip(held, examples, strict=False))


class CudaGraphCapture:
    """Captures CUDA graphs that share one memory pool, since no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._is_proven = False

    def __call__(self, function: Callable[[], None]) -> Replay:
        """Capture the function as a CUDA graph.

        Raises `torch.OutOfMemoryError`, after which smaller ones may be captured; `RuntimeError` for what cannot be
        captured, usually before anything is.
        """
        current = torch.cuda.current_stream(self._device)
        # The outer context restores the stream even if the capture fails.
        with torch.cuda.device(self._device), torch.cuda.stream(current):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()  # on the capture stream, since libraries allocate once per stream
                if not self._is_proven:
                    with _forbid_synchronization():
                        function()
                    self._is_proven = True
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device during the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                function()
        return graph.replay


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    """Raise `RuntimeError` inside if the host waits for the device, because that cannot be captured."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def within_reserved(
    reserved: int, held: Callable[[], int], setting: str, *, what: str = "CUDA graphs", lacks: str = "activations"
) -> Iterator[None]:
    """Compare how much memory of a device is taken inside with the bytes that were reserved for it, and warn of more.

    `held` returns the bytes that are taken so far. `what` takes them, and `lacks` names what has less if they are more.
    `setting` leaves more of the device if it is lower.
    """
    before = held()
    yield
    taken = held() - before
    numbers = f"{what} took {taken} bytes of the GPU, and {reserved} bytes were reserved for them"
    if taken > reserved:
        logger.warning("%s: what is missing is taken from %s; lower %s", numbers, lacks, setting)
    else:
        logger.info("%s", numbers)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of a GPU that PyTorch's allocator holds for tensors and CUDA graphs; 0 on a CPU.

    What it kept of freed tensors for later ones is given back first, as before each capture: this would hide what
    graphs take.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def peak_from_now(device: torch.device) -> Callable[[], int] | None:
    """Returns what reads the most bytes that a GPU's tensors took at once since this call; `None` on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return lambda: torch.cuda.max_memory_allocated(device)
