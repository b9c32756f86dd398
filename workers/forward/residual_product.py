"""The two products of a layer that end in the residual stream, on a GPU: with the addition, and the norm after it.

Their matrices have few outputs and many inputs. A library divides the inputs into splits, into how many depends on the
number of rows, and then the bits of a row depend on how many others are multiplied beside it: on an H200 from 64 rows
on. Here the kernel of `workers.forward.triton.residual` has fixed splits up to the largest step that a CUDA graph
holds. Beyond it, in steps with long prompt chunks, the library multiplies: there a product takes as long as its
operations, and a row's bits may differ from those in other steps. A matrix that the device multiplies faster by the
library stays with it. For few rows the kernel also computes SiLU · mul of a feed-forward network as it loads them, up
to as many as the device multiplies so without losing time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from workers.forward.projections import Gated

logger = logging.getLogger(__name__)

MOST_ROWS = 1024
"""Most rows that the kernel multiplies: those of every CUDA graph (`graph_sizes.MOST_TOKENS`) among them."""
_TRIAL_ROWS = (1, 4, 5, 16, 17, 64, 65, 128, 129)
"""Rows of the products of a trial: each kind of launch, with full tiles and others."""
_TIMED_ROWS = (1, 4, 8, 64)
GATED_ROWS = (1, 4, 8, 16)
"""Rows up to which a kernel may compute SiLU · mul by itself: each of its programs reads gates and values again."""
_SLOWEST = 1.05
"""Most time that the kernel may take with any of these numbers of rows, of what the library and the norm take."""
_LARGEST_ERROR = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Largest difference from the reference, relative to the largest number: some roundings."""
_TYPES = frozenset({torch.bfloat16, torch.float16})


class NoResidualProduct(Exception):
    """There is no such product with a matrix, as the message says."""


@dataclass(frozen=True, slots=True, eq=False)
class ResidualProduct:
    """A plain matrix, of which the products are added to the residual stream."""

    weight: torch.Tensor
    """`[out, in]`, with contiguous inputs."""
    bias: torch.Tensor | None
    counters: torch.Tensor
    """int32, zeros between launches: programs that have ended. It stays where it is, since CUDA graphs hold it."""
    kernels: Any
    """The module `workers.forward.triton.residual`."""
    most_gated: int = 0
    """Most rows of gates and values that it multiplies."""

    def multiply(self, x: torch.Tensor | Gated) -> torch.Tensor:
        """Multiply `x` `[rows, in]` → `[rows, out]`. Up to `MOST_ROWS` rows, no product depends on the other rows."""
        if isinstance(x, torch.Tensor) and len(x) > MOST_ROWS:
            return functional.linear(x, self.weight, self.bias)
        output: torch.Tensor = self.kernels.multiply(_contiguous(x), self.weight, self.bias, self.counters)
        return output

    def add_and_normalize(
        self, x: torch.Tensor | Gated, stream: torch.Tensor, norm: tuple[torch.Tensor, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`stream` `[rows, out]`, contiguous, plus the product of `x` `[rows, in]`, and the RMSNorm of that sum.

        `norm` is the norm's weight and epsilon. At most `MOST_ROWS` rows.
        """
        sums: tuple[torch.Tensor, torch.Tensor] = self.kernels.multiply_add_and_normalize(
            _contiguous(x), self.weight, self.bias, self.counters, stream, norm
        )
        return sums


def _contiguous(x: torch.Tensor | Gated) -> torch.Tensor | Gated:
    return x if isinstance(x, Gated) else x.contiguous()


_tried: set[tuple[object, ...]] = set()
"""Matrices whose like has passed a trial."""
_slower: dict[tuple[object, ...], str] = {}
"""What was found of the speed with matrices of one kind; empty: the kernel is fast enough."""
_most_gated: dict[tuple[object, ...], int] = {}
"""Most rows of gates and values that the kernel multiplies, with matrices of one kind."""


def residual_product(weight: torch.Tensor, bias: torch.Tensor | None, *, follows_gate: bool = False) -> ResidualProduct:
    """The product with a plain matrix `[out, in]`, after a trial on its device.

    With `follows_gate` the trial also finds up to how many rows the kernel computes SiLU · mul before it.

    Raises `NoResidualProduct` if there is none, if it fails its trial or is slower than the library, and `ImportError`
    without `triton`.
    """
    from workers.forward.triton import residual

    if weight.is_cuda and weight.dtype not in _TYPES:
        raise NoResidualProduct(f"the kernel does not multiply {weight.dtype}")
    if weight.stride(1) != 1:
        raise NoResidualProduct("the inputs of an output are not contiguous")
    product = ResidualProduct(weight, bias, residual.counters_for(len(weight), weight.device), residual)
    if weight.is_cuda:
        try:
            check_product(product)
            check_speed(product, device_milliseconds)
        except NoResidualProduct:
            raise
        except Exception as error:  # a compiler may raise anything
            raise NoResidualProduct(f"its kernel cannot be launched: {error!r}") from error
        return replace(product, most_gated=most_gated_rows(product, device_milliseconds)) if follows_gate else product
    return replace(product, most_gated=max(GATED_ROWS)) if follows_gate else product


def check_product(product: ResidualProduct) -> None:
    """Compare a product on its device with the library's, and the bits of rows among others and among few.

    Matrices of one shape are tried once. Raises `NoResidualProduct` if something differs; what a compiler raises goes
    through.
    """
    weight = product.weight
    key = _kind(product)
    if key in _tried:
        return
    draw = torch.Generator().manual_seed(0)
    outputs, inputs = weight.shape
    x, stream = (torch.randn((max(_TRIAL_ROWS), width), generator=draw).to(weight) for width in (inputs, outputs))
    norm = torch.ones(outputs, dtype=weight.dtype, device=weight.device), 1e-6
    whole, whole_sums, whole_norms = product.multiply(x), *product.add_and_normalize(x, stream, norm)
    expected = functional.linear(x, weight, product.bias)
    for found, right in ((whole, expected), (whole_sums, stream + expected)):
        error = float((found.float() - right.float()).abs().max() / right.float().abs().max())
        if not error <= _LARGEST_ERROR.get(weight.dtype, 2.0**-16):
            raise NoResidualProduct(f"it differs from the reference by {error:.1e} of the largest number")
    for count in _TRIAL_ROWS[:-1]:
        sums, norms = product.add_and_normalize(x[:count], stream[:count], norm)
        pairs = ((product.multiply(x[:count]), whole), (sums, whole_sums), (norms, whole_norms))
        if not all(torch.equal(few, many[:count]) for few, many in pairs):
            raise NoResidualProduct(f"a row has other bits among {count} rows than among {len(x)}")
    _tried.add(key)


def check_speed(product: ResidualProduct, milliseconds: Callable[[Callable[[], object]], float]) -> None:
    """Compare the time of a product, with what follows it, with that of the library and a norm of its own.

    `milliseconds` measures a call. Matrices of one shape are measured once, so that layers do not differ. Raises
    `NoResidualProduct` if the kernel takes longer with any of a few numbers of rows.
    """
    from workers.forward.triton.norm import add_and_normalize

    key = _kind(product)
    if key not in _slower:
        _slower[key] = ""
        weight, epsilon = product.weight, 1e-6
        norm = weight.new_ones(len(weight))
        for rows in _TIMED_ROWS:
            x, stream = weight.new_zeros((rows, weight.shape[1])), weight.new_zeros((rows, len(weight)))

            def ours(x: torch.Tensor = x, stream: torch.Tensor = stream) -> object:
                return product.add_and_normalize(x, stream, (norm, epsilon))

            def library(x: torch.Tensor = x, stream: torch.Tensor = stream) -> object:
                return add_and_normalize(stream, functional.linear(x, weight, product.bias), norm, epsilon)

            ratio = milliseconds(ours) / milliseconds(library)
            if ratio > _SLOWEST:
                _slower[key] = f"with {rows} rows it takes {ratio:.2f} times as long as the library and a norm"
                break
    if problem := _slower[key]:
        raise NoResidualProduct(problem)


def most_gated_rows(product: ResidualProduct, milliseconds: Callable[[Callable[[], object]], float]) -> int:
    """Most rows up to which the kernel computes SiLU · mul with the same bits as its own kernel, and as fast as both.

    0 if there are none; then the log says why. `milliseconds` measures a call. Matrices of one kind are tried once.
    """
    key = _kind(product)
    if key not in _most_gated:
        _most_gated[key] = 0
        try:
            _try_gates(product, milliseconds)
        except Exception as error:  # a compiler may raise anything
            logger.warning(
                "SiLU · mul before products %s is a launch of its own: %r", tuple(product.weight.shape), error
            )
    return _most_gated[key]


def _try_gates(product: ResidualProduct, milliseconds: Callable[[Callable[[], object]], float]) -> None:
    """Compare numbers of rows in ascending order, until the kernel is slower or has other bits."""
    from workers.forward.triton.gate import silu_mul

    weight, draw = product.weight, torch.Generator().manual_seed(0)
    outputs, inputs = weight.shape
    norm = weight.new_ones(outputs), 1e-6
    for rows in GATED_ROWS:
        both, stream = (3 * torch.randn((rows, width), generator=draw).to(weight) for width in (2 * inputs, outputs))
        x = Gated(both[:, :inputs], both[:, inputs:])

        def ours(x: Gated = x, stream: torch.Tensor = stream) -> tuple[torch.Tensor, torch.Tensor]:
            return product.add_and_normalize(x, stream, norm)

        def apart(x: Gated = x, stream: torch.Tensor = stream) -> tuple[torch.Tensor, torch.Tensor]:
            return product.add_and_normalize(silu_mul(x.gates, x.values), stream, norm)

        if not all(torch.equal(one, other) for one, other in zip(ours(), apart(), strict=True)):
            raise NoResidualProduct(f"with {rows} rows it has other bits")
        if milliseconds(ours) > milliseconds(apart):
            return
        _most_gated[_kind(product)] = rows


def device_milliseconds(call: Callable[[], object]) -> float:
    """Median time of a call on the GPU, each with cold caches, in milliseconds."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=5, rep=20, return_mode="median"))


def _kind(product: ResidualProduct) -> tuple[object, ...]:
    """What the speed and the bits of a product depend on."""
    weight = product.weight
    return weight.device, weight.dtype, weight.shape, weight.stride(0), product.bias is None
