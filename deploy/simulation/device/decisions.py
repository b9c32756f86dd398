"""Decisions and moves of a step on the fake device: the code that a GPU runs, with launches that are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from deploy.simulation.device.fake_device import Kernel, KernelCounter
from workers.forward.loaded_model import LoadedModel
from workers.sampling.context import RowDecisions, StepContexts
from workers.sampling.winners import Rows, Search
from workers.transfer import HostCopies
from workers.verify.decider import Decider, LocalDecider
from workers.verify.group_decider import GroupDecider

ALL_GATHER, GATHER = "all_gather", "gather_on_first"
"""What each rank receives of all others, and rank 0 alone, among the kernels that decide."""
_ENTRY_BYTES = 12
"""Bytes of the column, the factor and the term of an entry."""


class CountedDecisions:
    """`DecisionKernels`, each of which is counted instead of launched."""

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter

    def exclude_entries(
        self, excluded: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> None:
        entry = masks.element_size() + rows.element_size() + columns.element_size() + 2 * excluded.element_size()
        self._add("exclude_entries", len(columns) * entry)

    def largest_logits(self, logits: torch.Tensor, rows: Rows, orders: torch.Tensor, indices: torch.Tensor) -> None:
        self._add("largest_logits", self._read(logits, rows, len(orders)) + orders.nbytes + indices.nbytes)

    def sum_digits(self, logits: torch.Tensor, rows: Rows, search: Search, *, by_mass: bool, shift: int) -> None:  # noqa: ARG002 - part of the interface
        self._add("sum_digits", self._read(logits, rows, len(search.bests)))

    def choose_digits(self, rows: Rows, search: Search, *, by_mass: bool, shift: int) -> None:  # noqa: ARG002
        self._add("choose_digits", 2 * search.sums.nbytes)

    def best_of_tiles(
        self,
        logits: torch.Tensor,
        rows: Rows,
        truncation: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # noqa: ARG002 - part of the interface
        parts: tuple[torch.Tensor, torch.Tensor],
        offset: int,  # noqa: ARG002
    ) -> None:
        self._add("best_of_tiles", self._read(logits, rows, len(logits)) + sum(part.nbytes for part in parts))

    def join_tiles(
        self,
        parts: tuple[torch.Tensor, torch.Tensor],
        found: tuple[torch.Tensor, torch.Tensor],
        offset: int,  # noqa: ARG002 - part of the interface
    ) -> None:
        self._add("join_tiles", sum(one.nbytes for one in (*parts, *found)))

    def _read(self, logits: torch.Tensor, rows: Rows, count: int) -> int:
        """Bytes of so many of the rows, with their share of the entries and masks."""
        beside = (_ENTRY_BYTES + logits.element_size()) * len(rows.columns) + rows.excluded.nbytes
        return count * logits.shape[1] * logits.element_size() + beside * count // len(logits)

    def _add(self, name: str, moved: int) -> None:
        self._counter.add(Kernel(name, moved))


class CountedCopies:
    """`CopyKernels`, whose launch is counted."""

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter

    def records_of(self, stacks: Sequence[torch.Tensor]) -> int:
        """Bytes of a slot of all records."""
        return sum(stack[:, 0, 0].nbytes for stack in stacks)

    def copy_paths(
        self,
        records: int,
        ends: torch.Tensor,
        sources: torch.Tensor,
        destinations: torch.Tensor,
        slots: int = 1,
    ) -> None:
        listed = ends.nbytes + sources.nbytes + destinations.nbytes
        self._counter.add(Kernel("copy_entries", 2 * len(sources) * slots * records + listed))


class CountedExchange:
    """`Exchange` of rank 0, which receives nothing but counts what it would."""

    def __init__(self, ranks: int, counter: KernelCounter) -> None:
        self._ranks, self._counter = ranks, counter

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        self._counter.add(Kernel(ALL_GATHER, (self._ranks - 1) * own.nbytes))
        return own.new_empty((self._ranks, *own.shape))

    def gather(self, own: torch.Tensor) -> list[torch.Tensor] | None:
        self._counter.add(Kernel(GATHER, (self._ranks - 1) * own.nbytes))
        return [torch.empty_like(own) for _ in range(self._ranks)]

    def broadcast(self, numbers: torch.Tensor) -> None:
        """Hosts send it."""


@dataclass(frozen=True, slots=True)
class Decided:
    """What decides the tokens of a step, after the model's pass."""

    kernels: tuple[Kernel, ...]
    """In order, with what ranks send each other."""
    copies: int
    """Tensors copied to the device."""
    waits: int
    """Times that the host waits for the device."""
    read_bytes: int
    """Bytes copied to the host."""


def count_decisions(
    model: LoadedModel,
    ranks: int,
    logits: torch.Tensor,
    rows: Iterable[RowDecisions],
    launch_beside: Callable[[Decider, HostCopies], None] = lambda *_: None,
) -> Decided:
    """Let the first of some ranks decide, with logits `[decisions, vocabulary (this rank's part)]`.

    Each rank finds its best scores and tokens, which all exchange. For rows with top-k or top-p they also exchange sums
    by digit of their logits. Where log-probabilities are asked for, the first rank gathers the logits of the rows.
    `launch_beside` adds what else the host reads with the tokens.
    """
    counter = KernelCounter()
    kernels = CountedDecisions(counter)
    decider: Decider = LocalDecider(kernels)
    if ranks > 1:
        exchange = CountedExchange(ranks, counter)
        decider = GroupDecider(replace(model, tensor_parallel=ranks), 0, exchange, kernels)
    with counter, torch.inference_mode():
        copies = HostCopies()
        launched = decider.launch(logits, StepContexts(list(rows)), copies)
        launch_beside(decider, copies)
        launched.read()
    return Decided(tuple(counter.eager()), counter.copies, counter.waits, counter.read_bytes)
