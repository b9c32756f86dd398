"""Int8 weights: quantization within half a step, and products of integers times scale."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines.linear_checks import DTYPES, IN, OUT, WIDTHS, check, numbers
from workers.forward.linear import make_linear_kernel
from workers.forward.weights.int8 import Int8Storage, quantize


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of compiled kernels, for all tests of this file."""
    return str(tmp_path_factory.mktemp("code"))


class TestInt8:
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
    def test_weights_have_one_scale_per_output_and_an_error_of_at_most_half_a_step(self, dtype: torch.dtype) -> None:
        weight = (numbers(OUT, IN) * torch.logspace(-3, 1, OUT)[:, None]).to(dtype)
        integers, scale = quantize(weight)
        assert integers.dtype is torch.int8
        assert scale.shape == (OUT,)
        assert scale.dtype is dtype
        assert integers.abs().amax(dim=1).tolist() == [127] * OUT
        error = (integers.double() * scale.double()[:, None] - weight.double()).abs()
        assert bool((error <= 0.5000001 * scale.double()[:, None]).all())

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
    def test_zero_weights_stay_zero(self, dtype: torch.dtype) -> None:
        integers, scale = quantize(torch.stack([torch.zeros(IN), torch.ones(IN)]).to(dtype))
        assert not integers[0].any()
        assert scale.isfinite().all()
        assert (integers[1] == 127).all()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("biased", [False, True])
    def test_products_use_integers_times_scale_at_every_width(
        self, dtype: torch.dtype, biased: bool, code: str
    ) -> None:
        weight, bias = numbers(OUT, IN, dtype=dtype), numbers(OUT, dtype=dtype, seed=1) if biased else None
        storage = Int8Storage.quantized(weight)
        whole = storage.integers.double() * storage.scale.double()[:, None]
        for product in (make_linear_kernel(storage, bias, code), storage.kernel(bias)):
            for width in WIDTHS:
                x = numbers(width, IN, dtype=dtype, seed=width)
                check(product.multiply(x), x, whole, bias, roundings=3)
            x = numbers(2, 30, IN, dtype=dtype)
            check(product.multiply(x), x, whole, bias, roundings=3)


def test_int8_weights_accept_any_number_of_inputs(code: str) -> None:
    for inputs in (33, 40, 56, 60, 84):
        for dtype in DTYPES:
            storage = Int8Storage.quantized(numbers(OUT, inputs, dtype=dtype))
            whole = storage.integers.double() * storage.scale.double()[:, None]
            for kernel in (make_linear_kernel(storage, None, code), storage.kernel(None)):
                for rows in (1, 7, 50):
                    x = numbers(rows, inputs, dtype=dtype, seed=rows)
                    check(kernel.multiply(x), x, whole, None, roundings=3)
