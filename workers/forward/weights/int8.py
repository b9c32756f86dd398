"""Symmetric int8 weights with one scale per output. Activations are not quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workers.forward.weights.base import (
    Blocks,
    KernelLayout,
    Kind,
    LinearKernel,
    Storage,
    Take,
    pack_blocks,
    pad_rows,
    row_nbytes,
    taken_rows,
)
from workers.forward.weights.groups import GroupStorage
from workers.forward.weights.plain import DenseKernel
from workers.forward.weights.words import Words
from workers.ranks import largest_over_ranks

_SLICE_OUTPUTS = 256  # weights are converted for so many outputs at a time, which the caches hold


@dataclass(frozen=True, slots=True, eq=False)
class Int8Storage:
    """A matrix of int8 numbers with one scale per output."""

    integers: torch.Tensor
    """int8 `[out, in]`."""
    scale: torch.Tensor
    """`[out]`."""

    @staticmethod
    def quantized(weight: torch.Tensor, cut_inputs: bool = False) -> Int8Storage:
        """Quantize weights `[out, in]`. `cut_inputs`: see `quantize`."""
        return Int8Storage(*quantize(weight, cut_inputs))

    @property
    def outputs(self) -> int:
        return self.integers.shape[0]

    @property
    def inputs(self) -> int:
        return self.integers.shape[1]

    @property
    def nbytes(self) -> int:
        return self.integers.nbytes + self.scale.nbytes

    def nbytes_of(self, outputs: int, *, on_gpu: bool = False) -> int:
        if on_gpu:
            return self._grouped().nbytes_of(outputs, on_gpu=True)
        return outputs * (row_nbytes(self.integers) + row_nbytes(self.scale))

    @property
    def device(self) -> torch.device:
        return self.integers.device

    @property
    def is_widened(self) -> bool:
        return True

    @property
    def plain(self) -> None:
        return None

    @property
    def has_packed_rows(self) -> bool:
        return False

    @property
    def has_own_size(self) -> bool:
        return False

    def to(self, device: torch.device) -> Int8Storage:
        if device == self.device:
            return self
        return Int8Storage(self.integers.to(device), self.scale.to(device))

    def dequantized(self) -> torch.Tensor:
        return self.integers.float() * self.scale.float()[:, None]

    def take_outputs(self, outputs: slice | torch.Tensor) -> Int8Storage:
        return Int8Storage(taken_rows(self.integers, outputs), taken_rows(self.scale, outputs))

    def take_inputs(self, inputs: slice) -> Int8Storage:
        return Int8Storage(self.integers[:, inputs], self.scale)

    def joined(self, others: Sequence[Storage]) -> Storage:
        same = [one for one in others if isinstance(one, Int8Storage)]
        if len(same) < len(others):
            return self._grouped().joined([one._grouped() if isinstance(one, Int8Storage) else one for one in others])
        everything = (self, *same)
        return Int8Storage(
            torch.cat([one.integers for one in everything]), torch.cat([one.scale for one in everything])
        )

    def _grouped(self) -> GroupStorage:
        """The matrix as groups of 8 bits, one group for each output."""
        return GroupStorage(self.integers, self.scale[:, None], 8)

    def kernel(self, bias: torch.Tensor | None) -> Int8Kernel:
        return Int8Kernel(self.integers, self.scale, bias)

    def kernel_of(self, make: Callable[[Storage], LinearKernel]) -> LinearKernel:
        return make(self)

    def words(self) -> Words:
        return self._grouped().words()

    def blocks(self, layout: KernelLayout, take: Take) -> Blocks:
        on_tiles = layout.multiplies_integers(self.inputs)
        packed = pack_blocks(self.integers, layout.columns, take, on_tiles=on_tiles)
        kind = Kind.INT8_TILES if on_tiles else Kind.INT8
        return Blocks(kind, packed, pad_rows(self.scale.float(), layout.columns).clone())


@dataclass(slots=True)
class Int8Kernel:
    """Products with int8 weights by torch's operators."""

    weight: torch.Tensor  # [out, in] int8
    scale: torch.Tensor  # [out]
    bias: torch.Tensor | None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` `[…, in]` → `[…, out]`: `(x @ integers) * scale`. No row's product depends on the other rows.

        Its code does not depend on the number of rows. int8 values are exact in every floating type.
        """
        flat = x.flatten(0, -2)
        slices = torch.split(self.weight, _SLICE_OUTPUTS)
        product = torch.cat([DenseKernel(part.to(x.dtype), None).multiply(flat) for part in slices], dim=-1)
        product = (product * self.scale).to(x.dtype)
        if self.bias is not None:
            product = product + self.bias
        return product.view(*x.shape[:-1], -1)


def quantize(weight: torch.Tensor, cut_inputs: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights `[out, in]` to int8 `[out, in]` and scales `[out]`, rounding to the nearest.

    With `cut_inputs` each rank holds some of the inputs. All ranks then use the scale of the whole row, so that the
    quantized weights do not depend on the number of ranks.
    """
    largest = weight.float().abs().amax(dim=1)
    if cut_inputs:
        largest_over_ranks(largest)
    # The integers are computed with the scale as it is stored, rounded to the type of the weights.
    scale = (largest / 127.0).to(weight.dtype)
    step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)
    integers = (weight.float() / step[:, None]).round().clamp(-127, 127).to(torch.int8)
    return integers, scale
