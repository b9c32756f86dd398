"""4-bit weights: quantization within half a step of a group, in the widest groups that divide the inputs."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines.linear_checks import DTYPES, OUT, numbers
from workers.forward.weights.groups import GroupStorage
from workers.forward.weights.int4 import quantized_groups
from workers.forward.weights.int8 import Int8Storage


def groups_of(weight: torch.Tensor) -> GroupStorage:
    storage = quantized_groups(weight)
    assert isinstance(storage, GroupStorage)
    return storage


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize(("inputs", "group"), [(96, 32), (48, 16), (40, 8)])
def test_weights_have_an_error_of_at_most_half_a_step_of_their_group(
    inputs: int, group: int, dtype: torch.dtype
) -> None:
    weight = (numbers(OUT, inputs) * torch.logspace(-3, 1, OUT)[:, None]).to(dtype)
    storage = groups_of(weight)
    assert (storage.group, storage.bits) == (group, 4)
    assert storage.nbytes == OUT * inputs // 2 + OUT * inputs // group * 4
    error = (storage.dequantized() - weight.float()).abs().view(OUT, -1, group)
    step = storage.scale.float()[..., None]
    rounded = weight.float().abs().view(OUT, -1, group).amax(dim=2, keepdim=True)  # the minimum, and 15 times the scale
    assert bool((error <= 0.5001 * step + 2.0**-8 * rounded).all())
    values = storage.integers().view(OUT, -1, group)
    assert (int(values.min()), int(values.max())) == (0, 15)


def test_one_outlier_makes_no_other_group_coarse() -> None:
    weight = numbers(4, 96)
    changed = weight.clone()
    changed[1, 40] = 1e4
    whole, other = quantized_groups(weight).dequantized(), quantized_groups(changed).dequantized()
    alike = whole == other
    assert bool(alike[:, :32].all() and alike[:, 64:].all() and alike[[0, 2, 3]].all())
    assert int(alike[1, 32:64].sum()) <= 1  # the smallest one


def test_equal_weights_stay_as_they_are() -> None:
    weight = torch.cat([torch.zeros(3, 32), torch.full((3, 32), -0.75)], dim=1)
    assert torch.equal(quantized_groups(weight).dequantized(), weight)


@pytest.mark.parametrize("size", [1e38, 1e-30])
def test_the_largest_and_the_smallest_weights_have_a_scale(size: float) -> None:
    weight = numbers(3, 64).clamp(-1.5, 1.5) * size
    error = (quantized_groups(weight).dequantized() / size - weight / size).abs()
    assert float(error.max()) < 0.12


def test_outputs_do_not_depend_on_the_slice_that_they_are_quantized_in() -> None:
    weight = numbers(1500, 32)
    assert torch.equal(quantized_groups(weight).dequantized()[1100:], quantized_groups(weight[1100:]).dequantized())


@pytest.mark.parametrize("inputs", [7, 84, 250])
def test_inputs_that_fill_no_words_are_stored_in_8_bits(inputs: int) -> None:
    weight = numbers(OUT, inputs)
    storage = quantized_groups(weight)
    assert isinstance(storage, Int8Storage)
    assert torch.equal(storage.dequantized(), Int8Storage.quantized(weight).dequantized())
