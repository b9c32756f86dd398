"""Plain numbers: float32, bfloat16, float16.

On CPU a row's product has the same bits whichever rows are multiplied beside it. Libraries choose code by the number of
rows, and other code adds in another order. So rows are multiplied in tiles of a fixed number of rows, and in smaller
ones only where a trial shows the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from workers.forward.weights.base import (
    Blocks,
    KernelLayout,
    Kind,
    LinearKernel,
    NoGpuProduct,
    Storage,
    Take,
    pack_blocks,
    row_nbytes,
    taken_rows,
)
from workers.forward.weights.words import Words

_KINDS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16}
_TILE_ROWS = 64
_LEAST_COMPARED = 1 << 19
"""Least numbers of 16 bits that a trial compares: rounding hides most differences between two orders of addition."""
_LEAST_CANCELLED = 1 << 12
"""Least numbers of 16 bits that a trial compares where all sums cancel: what is left is the error of their order."""
_MOST_CANCELLED = 1 << 22
"""Most weights that a trial replaces with others, whose sums cancel."""
_ALIGNMENT = 64  # bytes; other alignments of its input can make a library add in another order
_PACKED_FOR_ROWS = 8  # oneDNN's layout for this width serves the others as well


@dataclass(frozen=True, slots=True, eq=False)
class PlainStorage:
    """A matrix of plain numbers."""

    weight: torch.Tensor
    """`[out, in]`."""

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def nbytes_of(self, outputs: int, *, on_gpu: bool = False) -> int:  # noqa: ARG002 - the same anywhere
        return outputs * row_nbytes(self.weight)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def is_widened(self) -> bool:
        return False

    @property
    def plain(self) -> torch.Tensor:
        return self.weight

    @property
    def has_packed_rows(self) -> bool:
        return True

    @property
    def has_own_size(self) -> bool:
        return False

    def to(self, device: torch.device) -> PlainStorage:
        return self if device == self.device else PlainStorage(self.weight.to(device))

    def dequantized(self) -> torch.Tensor:
        return self.weight.float()

    def take_outputs(self, outputs: slice | torch.Tensor) -> PlainStorage:
        return PlainStorage(taken_rows(self.weight, outputs))

    def take_inputs(self, inputs: slice) -> PlainStorage:
        return PlainStorage(self.weight[:, inputs])

    def joined(self, others: Sequence[Storage]) -> PlainStorage:
        weights = [
            one.weight if isinstance(one, PlainStorage) else one.dequantized().to(self.weight.dtype) for one in others
        ]
        return PlainStorage(torch.cat([self.weight, *weights]))

    def kernel(self, bias: torch.Tensor | None) -> LinearKernel:
        if self.weight.device.type == "cpu" and _can_pack(self.weight.dtype):
            return OneDnnKernel(_in_layout_of_onednn(self.weight), bias)
        return DenseKernel(self.weight, bias)

    def kernel_of(self, make: Callable[[Storage], LinearKernel]) -> LinearKernel:
        return make(self)

    def words(self) -> Words:
        raise NoGpuProduct("plain numbers, which torch multiplies as they are")

    def blocks(self, layout: KernelLayout, take: Take) -> Blocks:
        return Blocks(_KINDS[self.weight.dtype], pack_blocks(self.weight, layout.columns, take))


@dataclass(slots=True)
class DenseKernel:
    """Weights in torch's own layout."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` `[…, in]` → `[…, out]`. On CPU no row's product depends on the other rows."""
        return self.product(x) if self.weight.device.type != "cpu" else _in_tiles(x, self)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply all rows at once."""
        return nn.functional.linear(x, self.weight, self.bias)

    def with_weight(self, weight: torch.Tensor) -> DenseKernel:
        """A kernel of other weights `[out, in]` in the same layout, with a bias of zeros if there is one."""
        like = torch.empty_strided(self.weight.shape, self.weight.stride(), dtype=self.weight.dtype)
        return DenseKernel(like.copy_(weight), _zeros(self.bias))


@dataclass(slots=True)
class OneDnnKernel:
    """Weights in oneDNN's own layout."""

    weight: torch.Tensor  # opaque
    bias: torch.Tensor | None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` `[…, in]` → `[…, out]`. No row's product depends on the other rows."""
        return _in_tiles(x, self)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply all rows at once."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return product

    def with_weight(self, weight: torch.Tensor) -> OneDnnKernel:
        """A kernel of other weights `[out, in]` in the same layout, with a bias of zeros if there is one."""
        return OneDnnKernel(_in_layout_of_onednn(weight.to(self.weight.dtype)), _zeros(self.bias))


def _in_layout_of_onednn(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
    return packed


def _zeros(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else torch.zeros_like(bias)


class TiledWeight(torch.Tensor):
    """Weights `[out, in]` of a module with a product of its own, as a router: on CPU no row depends on the other rows.

    Compiled code multiplies as the compiler chooses.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function is nn.functional.linear and not torch.compiler.is_compiling() and isinstance(args[1], cls):
                bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
                return DenseKernel(args[1].as_subclass(torch.Tensor), bias).multiply(args[0])
            output = function(*args, **kwargs)
        is_same = function in _CONVERSIONS and isinstance(output, torch.Tensor)
        return output.as_subclass(cls) if is_same else output


_CONVERSIONS = (torch.Tensor.detach, torch.Tensor.type, torch.Tensor.to, torch.Tensor.float)


_exact_widths: dict[tuple[object, ...], tuple[int, ...]] = {}
"""What `exact_widths` found, by all that a library may choose its code by."""


def _in_tiles(x: torch.Tensor, kernel: DenseKernel | OneDnnKernel) -> torch.Tensor:
    """Multiply `x` `[…, in]` → `[…, out]`, only with numbers of rows at which the kernel gives the same bits."""
    weight = kernel.weight
    strides = weight.stride() if weight.layout is torch.strided else None
    key = (weight.layout, weight.shape, strides, weight.dtype, kernel.bias is None, torch.get_num_threads())
    widths = _exact_widths.get(key)
    if widths is None:
        widths = _exact_widths[key] = _tried_widths(kernel)
    flat = x.reshape(-1, x.shape[-1])
    parts = [_padded_product(rows, kernel.product, widths) for rows in torch.split(flat, widths[-1])]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*x.shape[:-1], -1)


def _padded_product(
    rows: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], widths: Sequence[int]
) -> torch.Tensor:
    """The product of at most `widths[-1]` rows, with rows of zeros up to the next width."""
    missing = next(width for width in widths if width >= len(rows)) - len(rows)
    if missing:
        return product(nn.functional.pad(rows, (0, 0, 0, missing)))[: len(rows)]
    return product(rows.contiguous() if rows.data_ptr() % _ALIGNMENT == 0 else rows.clone())


def _tried_widths(kernel: DenseKernel | OneDnnKernel) -> tuple[int, ...]:
    """What `exact_widths` finds for `kernel`. Weights of 16 bits are replaced in the trial if they are few.

    Their rows and sums would have to be many: one sum in ten thousand shows that it was added in another order.
    """
    weight, dtype = kernel.weight, kernel.weight.dtype
    outputs, inputs = weight.shape
    if dtype.itemsize > 2 or outputs * inputs > _MOST_CANCELLED:
        return exact_widths(kernel.product, partial(_random, inputs), dtype)
    cancelling = Cancelling(inputs)
    product = kernel.with_weight(cancelling.weight(outputs)).product
    return exact_widths(product, cancelling.rows, dtype, _LEAST_CANCELLED)


def _random(inputs: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=generator)


class Cancelling:
    """Weights and rows whose products are sums of pairs that cancel, so that only the error of adding them is left.

    The terms have magnitudes so far apart that nearly every addition rounds.
    """

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._partner = torch.randperm(inputs // 2, generator=torch.Generator().manual_seed(1))

    def weight(self, outputs: int) -> torch.Tensor:
        """Returns `[outputs, inputs]`."""
        return self._paired(torch.randn(outputs, len(self._partner), generator=torch.Generator().manual_seed(2)), 1)

    def rows(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Returns `[rows, inputs]`."""
        shape = rows, len(self._partner)
        scale = torch.exp2(torch.randint(0, 9, shape, generator=generator))
        return self._paired(torch.randn(shape, generator=generator) * scale, -1)

    def _paired(self, half: torch.Tensor, sign: int) -> torch.Tensor:
        """`half` `[rows, inputs // 2]`, then the same in another order times `sign`, and zeros for an odd input."""
        whole = torch.cat([half, sign * half[:, self._partner]], dim=1)
        return nn.functional.pad(whole, (0, self._inputs - whole.shape[1]))


def exact_widths(
    product: Callable[[torch.Tensor], torch.Tensor],
    draw: Callable[[int, torch.Generator], torch.Tensor],
    dtype: torch.dtype,
    least: int = _LEAST_COMPARED,
) -> tuple[int, ...]:
    """Find the numbers of rows, ascending, at which `product` gives each row the same bits, by a trial on random rows.

    They are those widths of `padded_rows` that agree with the widest tile. If the tile's own rows depend on where they
    stand in it, rows are multiplied one at a time. `draw` returns as many rows `[rows, in]` as it is asked for, and at
    `least` so many numbers of 16 bits are compared.
    """
    generator, shift = torch.Generator().manual_seed(0), _TILE_ROWS // 5
    tiles: list[tuple[torch.Tensor, torch.Tensor]] = []
    least, compared = 1 if dtype.itemsize > 2 else least, 0
    while compared < least:
        tile = draw(_TILE_ROWS, generator).to(dtype)
        tiles.append((tile, product(tile)))
        if not torch.equal(product(tile.roll(shift, 0)).roll(-shift, 0), tiles[-1][1]):
            return (1,)
        compared += tiles[-1][1].numel()
    widths = sorted({padded_rows(rows) for rows in range(1, _TILE_ROWS)} - {_TILE_ROWS})
    return (*(width for width in widths if _agrees(product, width, tiles, least)), _TILE_ROWS)


def _agrees(
    product: Callable[[torch.Tensor], torch.Tensor],
    width: int,
    tiles: Sequence[tuple[torch.Tensor, torch.Tensor]],
    least: int,
) -> bool:
    """Whether `width` rows of `tiles`, each with its product, have the same bits alone, in `least` numbers or all."""
    compared = 0
    for tile, whole in tiles:
        for first in range(width % (_TILE_ROWS - width), _TILE_ROWS - width + 1, width):
            if not torch.equal(product(tile[first : first + width].clone()), whole[first : first + width]):
                return False
            compared += width * whole.shape[1]
            if compared >= least:
                return True
    return True


def padded_rows(rows: int) -> int:
    """Round up to one of few widths: exact up to 8, and at most a quarter wider beyond."""
    if rows <= 8:
        return rows
    grain = max(4, 1 << (rows - 1).bit_length() - 3)
    return -(-rows // grain) * grain


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32
