"""A rank's inputs of weights in activation order: their groups have different sizes, and are padded to one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from workers.forward.weights.base import Blocks, CutRefused, KernelLayout, LinearKernel, Storage, Take
from workers.forward.weights.integers import groups_of_integers
from workers.forward.weights.plain import PlainStorage
from workers.forward.weights.words import Words

_GRAIN = 8
"""Columns of a group are a multiple of this, as the kernels read words."""
_SCALE_BYTES = 4
"""Bytes of a group's scale and zero."""


@dataclass(frozen=True, slots=True, eq=False)
class GatheredStorage:
    """A matrix whose columns are in another order than its inputs, and more: some have zeros alone."""

    stored: Storage
    """`[out, columns]`."""
    places: torch.Tensor
    """int64 `[columns]`: the input that each column is multiplied by."""
    inputs: int
    """Number of inputs."""

    @property
    def outputs(self) -> int:
        return self.stored.outputs

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(self.outputs)

    def nbytes_of(self, outputs: int, *, on_gpu: bool = False) -> int:
        return self.stored.nbytes_of(outputs, on_gpu=on_gpu) + self.places.nbytes

    @property
    def device(self) -> torch.device:
        return self.stored.device

    @property
    def is_widened(self) -> bool:
        return self.stored.is_widened

    @property
    def plain(self) -> None:
        return None

    @property
    def has_packed_rows(self) -> bool:
        return True

    @property
    def has_own_size(self) -> bool:
        return True  # groups are padded by how many inputs they have

    def to(self, device: torch.device) -> GatheredStorage:
        return replace(self, stored=self.stored.to(device), places=self.places.to(device))

    def dequantized(self) -> torch.Tensor:
        columns = self.stored.dequantized()
        return columns.new_zeros(self.outputs, self.inputs).index_add_(1, self.places, columns)

    def take_outputs(self, outputs: slice | torch.Tensor) -> GatheredStorage:
        return replace(self, stored=self.stored.take_outputs(outputs))

    def take_inputs(self, inputs: slice) -> GatheredStorage:
        raise CutRefused(f"inputs {inputs.start} to {inputs.stop} of weights that are gathered for a rank")

    def joined(self, others: Sequence[Storage]) -> Storage:
        return PlainStorage(self.dequantized()).joined(others)

    def kernel(self, bias: torch.Tensor | None) -> LinearKernel:
        return self.kernel_of(lambda stored: stored.kernel(bias))

    def kernel_of(self, make: Callable[[Storage], LinearKernel]) -> LinearKernel:
        return _GatheringKernel(make(self.stored), self.places)

    def words(self) -> Words:
        """Raises `TypeError`: `kernel_of` makes the product."""
        raise TypeError("gathered weights have no words of their own")

    def blocks(self, layout: KernelLayout, take: Take) -> Blocks:  # noqa: ARG002 - of the protocol
        """Raises `TypeError`: `kernel_of` makes the product."""
        raise TypeError("gathered weights have no blocks of their own")


@dataclass(frozen=True, slots=True, eq=False)
class _GatheringKernel:
    """Products with the columns of the inputs."""

    kernel: LinearKernel
    places: torch.Tensor

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` `[…, in]` → `[…, out]`. On CPU no row's product depends on the other rows."""
        return self.kernel.multiply(x[..., self.places])


def gathered_groups(
    integers: torch.Tensor, bits: int, scales: torch.Tensor, zeros: torch.Tensor | None, group_of: torch.Tensor
) -> GatheredStorage:
    """Groups of any sizes from integers uint8 `[out, in]`; the other arguments are those of `group_storage`.

    The columns of a group are its inputs, and then one of these again, with a weight of 0. The size that takes the
    least bytes is chosen. Zeros are whole numbers.
    """
    groups = scales.shape[1]
    counts = torch.bincount(group_of, minlength=groups)
    size = _best_size(counts, 4 if bits < 8 else 8)
    parts = -(-counts // size)
    group_of_column = torch.arange(groups).repeat_interleave(parts * size)
    order = group_of.argsort(stable=True)
    first_input, first_column = counts.cumsum(0) - counts, (parts * size).cumsum(0) - parts * size
    own = group_of[order]
    column = first_column[own] + torch.arange(len(order)) - first_input[own]
    places = order[first_input[group_of_column]]
    places[column] = order
    if zeros is None:
        values = integers.new_full((len(integers), len(places)), 1 << (bits - 1))
    else:
        values = zeros[:, group_of_column].to(torch.uint8)
        zeros = zeros.repeat_interleave(parts, dim=1)
    values[:, column] = integers[:, order]
    in_order = torch.arange(len(places)) // size
    stored = groups_of_integers(values, bits, scales.repeat_interleave(parts, dim=1), zeros, in_order)
    return GatheredStorage(stored, places, integers.shape[1])


def _best_size(counts: torch.Tensor, bits: int) -> int:
    """The columns of a group with which groups of `counts` inputs take the least bytes."""
    most = -(-int(counts.max()) // _GRAIN) * _GRAIN
    sizes = range(most, 0, -_GRAIN)
    return min(sizes, key=lambda size: int((-(-counts // size)).sum()) * (size * bits // 8 + _SCALE_BYTES))
