"""Products with packed matrices on a GPU, as one custom operator, and their trial on the device.

The operator is `pilotfish::group_product`. Its kernel needs the package `triton`, which is imported at the first
product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.forward.operators import define
from workers.forward.weights.base import NoGpuProduct, Storage
from workers.forward.weights.words import Values, Words

_TRIAL_ROWS = (1, 16, 17, 65)
"""Rows of the products of a trial: each kind of launch, with full tiles and others."""
_TRIAL_OUTPUTS = 256
"""Outputs that a trial compares with the reference."""
_LARGEST_ERROR = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2.0**-16}
"""Largest difference from the reference, relative to the largest product: two roundings, even if they cut off bits."""


@dataclass(frozen=True, slots=True, eq=False)
class GpuProduct:
    """The weights of a linear layer on a GPU, which no product widens in memory."""

    matrix: Words
    bias: torch.Tensor | None
    table: torch.Tensor | None = None
    """What values of `Values.TABLE` choose from, in the type of the inputs: to that type products round it."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` `[…, in]` → `[…, out]`. No row's product depends on the other rows."""
        flat = x.reshape(-1, x.shape[-1])
        flat = flat.contiguous() if self.matrix.order is None else flat.index_select(1, self.matrix.order)
        own, bias = self.matrix, self.bias
        table = own.table if self.table is None else self.table
        others = (one for one in (own.offset, own.units, table, bias) if one is not None)
        parts = [own.words, own.scale, own.counters, *others]
        shape = (own.outputs, own.inputs, own.chunk, own.step_group, own.group_steps, own.splits)
        kind = (int(own.values), int(own.has_minimum), int(own.has_zero), int(own.offset is not None), own.super_groups)
        product: torch.Tensor = torch.ops.pilotfish.group_product(flat, parts, [*shape, *kind], own.zero)
        return product.view(*x.shape[:-1], own.outputs)


_tried: set[tuple[object, ...]] = set()
"""Matrices whose like has passed a trial."""


def gpu_product(storage: Storage, bias: torch.Tensor | None, dtype: torch.dtype) -> GpuProduct:
    """The product of inputs of this type with a matrix on a GPU, after a trial there. `bias` is `[out]`, or none.

    Raises `NoGpuProduct` if there is none, or if it fails its trial.
    """
    matrix = storage.words()
    product = GpuProduct(matrix, bias, None if matrix.table is None else matrix.table.to(dtype))
    if storage.device.type == "cuda":
        reference = storage.take_outputs(slice(0, _TRIAL_OUTPUTS)).dequantized()
        try:
            check_product(product, reference, dtype)
        except NoGpuProduct:
            raise
        except Exception as error:  # a compiler may raise anything
            raise NoGpuProduct(f"its kernel cannot be launched: {error!r}") from error
    return product


def check_product(product: GpuProduct, reference: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare a product on its device with the first outputs of the reference, float32 `[outputs, in]`.

    Matrices of one shape and one storage are tried once. Raises `NoGpuProduct` if it differs, or if a row's bits
    depend on the number of rows; what a compiler raises goes through.
    """
    matrix = product.matrix
    key = (
        *(matrix.words.device, dtype, matrix.values, matrix.outputs, matrix.inputs, matrix.chunk, matrix.step_group),
        *(matrix.scale.dtype, matrix.offset is None, matrix.has_minimum, matrix.has_zero, product.bias is None),
        matrix.super_groups,
    )
    if key in _tried:
        return
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn((max(_TRIAL_ROWS), matrix.inputs), generator=draw).to(reference.device, dtype)
    expected = rows.float() @ reference.T
    if product.bias is not None:
        expected += product.bias[: len(reference)].float()
    whole = product.multiply(rows)
    error = float((whole[:, : len(reference)].float() - expected).abs().max() / expected.abs().max())
    if not error <= _LARGEST_ERROR[dtype]:
        raise NoGpuProduct(f"it differs from the reference by {error:.1e} of the largest number")
    for count in _TRIAL_ROWS[:-1]:
        if not torch.equal(product.multiply(rows[:count]), whole[:count]):
            raise NoGpuProduct(f"the product of a row has other bits among {count} rows than among {len(rows)}")
    _tried.add(key)


def _multiply(x: torch.Tensor, parts: list[torch.Tensor], numbers: list[int], zero: float) -> torch.Tensor:
    from workers.forward.triton.group_product import multiply

    outputs, inputs, chunk, step_group, group_steps, splits, values, has_minimum, has_zero, has_offset, super_groups = (
        numbers
    )
    words, scale, counters, *others = parts
    matrix = Words(
        words=words,
        scale=scale,
        offset=others.pop(0) if has_offset else None,
        counters=counters,
        values=Values(values),
        outputs=outputs,
        inputs=inputs,
        chunk=chunk,
        step_group=step_group,
        group_steps=group_steps,
        splits=splits,
        has_minimum=bool(has_minimum),
        has_zero=bool(has_zero),
        zero=zero,
        order=None,  # of the rows, which are in the matrix's order by now
        units=others.pop(0) if super_groups else None,
        super_groups=super_groups,
        table=others.pop(0) if values == Values.TABLE else None,
    )
    return multiply(x, matrix, others[0] if others else None)


def _shape(x: torch.Tensor, parts: list[torch.Tensor], numbers: list[int], zero: float) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty((len(x), numbers[0]))


define("group_product(Tensor x, Tensor[] parts, int[] numbers, float zero) -> Tensor", _multiply, _shape)
