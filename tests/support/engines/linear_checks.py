"""Checks a linear layer's output against a product in double precision."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2**-11}
"""Relative error of one rounding."""
IN, OUT = 48, 40
WIDTHS = (*range(1, 41), 47, 48, 49, 63, 64, 65, 100, 128, 200)
"""Numbers of tokens in a step: all small ones, and both sides of every switch between implementations."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, roundings: int
) -> None:
    """Check that `found` is `x @ weight.T + bias` up to `roundings` roundings and those of a float32 sum."""
    wide, whole = x.double(), weight.double()
    expected = wide @ whole.T
    size = wide.abs() @ whole.abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    allowed = roundings * UNIT[found.dtype] * (expected.abs() + (0 if bias is None else bias.double().abs()))
    allowed += x.shape[-1] * UNIT[torch.float32] * size
    assert found.shape == expected.shape
    assert bool(((found.double() - expected).abs() <= allowed).all())
