"""A rank's part of weights in activation order, whose groups have different sizes, multiplies as its weights do."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines.linear_checks import DTYPES, OUT, WIDTHS, numbers
from workers.forward.linear import make_linear_kernel
from workers.forward.weights.base import CutRefused
from workers.forward.weights.gathered import gathered_groups
from workers.forward.weights.groups import GroupStorage

GROUPS, INPUTS = 4, 44


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of compiled kernels, for all tests of this file."""
    return str(tmp_path_factory.mktemp("code"))


def drawn(bits: int, has_zeros: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Integers, scales, zeros and the group of each input: groups of 21, 5, 0 and 18 inputs."""
    draw = torch.Generator().manual_seed(bits)
    group_of = torch.tensor([0] * 21 + [1] * 5 + [3] * 18)[torch.randperm(INPUTS, generator=draw)]
    integers = torch.randint(0, 1 << bits, (OUT, INPUTS), generator=draw, dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (OUT, GROUPS), generator=draw, dtype=torch.uint8)
    return integers, 0.01 + torch.rand(OUT, GROUPS, generator=draw).half(), zeros if has_zeros else None, group_of


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_those_of_their_groups(bits: int, has_zeros: bool) -> None:
    integers, scales, zeros, group_of = drawn(bits, has_zeros)
    storage = gathered_groups(integers, bits, scales, zeros, group_of)
    middle = torch.full((OUT, GROUPS), 1 << (bits - 1)) if zeros is None else zeros
    wanted = (integers.float() - middle.float()[:, group_of]) * scales.float()[:, group_of]
    assert torch.equal(storage.dequantized(), wanted)
    assert (storage.outputs, storage.inputs) == (OUT, INPUTS)
    assert isinstance(storage.stored, GroupStorage)
    assert len(storage.places) == storage.stored.inputs > INPUTS
    assert torch.equal(storage.take_outputs(slice(3, 9)).dequantized(), wanted[3:9])
    with pytest.raises(CutRefused, match="inputs 0 to 8"):
        storage.take_inputs(slice(0, 8))


def test_the_size_that_takes_the_least_bytes_is_chosen() -> None:
    """Groups of 64 inputs each: one of 72 columns for all of them would have columns of zeros alone."""
    integers = torch.zeros(OUT, 128, dtype=torch.uint8)
    scales, group_of = torch.ones(OUT, 2).half(), torch.arange(128) % 2
    assert len(gathered_groups(integers, 4, scales, None, group_of).places) == 128
    uneven = torch.cat([torch.zeros(66), torch.ones(62)]).long()
    assert len(gathered_groups(integers, 4, scales, None, uneven).places) == 144


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_those_of_the_weights(bits: int, dtype: torch.dtype, code: str) -> None:
    integers, scales, zeros, group_of = drawn(bits, has_zeros=True)
    storage = gathered_groups(integers, bits, scales, zeros, group_of)
    bias = numbers(OUT, dtype=dtype, seed=1)
    x = numbers(max(WIDTHS), INPUTS, dtype=dtype)
    wanted = x.float() @ storage.dequantized().T + bias.float()
    bound = 2e-2 if dtype is torch.bfloat16 else 1e-5
    for kernel in (make_linear_kernel(storage, bias, code, dtype), storage.kernel(bias)):
        found = kernel.multiply(x)
        assert float((found.float() - wanted).abs().max() / wanted.abs().max()) < bound
        for width in WIDTHS:
            assert torch.equal(kernel.multiply(x[:width]), found[:width])
